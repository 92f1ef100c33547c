"""Binding: one plugin is checked against the hook specifications and put into a plugin manager of its own.

pluggy accepts more than can work: a misspelt hook, an unmarked one, a class instead of an object, arguments that are
never passed. Each of these is found here, when the strategy is named, not at the first step of a training run.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pluggy

from parallel_core import defaults, hookspecs
from parallel_core.errors import StrategyError, did_you_mean
from parallel_core.hookspecs import REQUIRED_HOOKS
from parallel_core.registry import Registration

PROJECT = "parallel_core"


def specifications() -> dict[str, Any]:
    """Return the hook specifications, functions by name."""
    return {name: spec for name, spec in vars(hookspecs).items() if getattr(spec, f"{PROJECT}_spec", None)}


def bind(registration: Registration, plugin: object) -> pluggy.HookRelay:
    """Return the hooks of one strategy: its own implementations, and the defaults for what it leaves out.

    Raises:
        StrategyError: the plugin breaks the contract; the message names distribution, hook and what to do.
    """
    if inspect.isclass(plugin):
        raise StrategyError(
            f"strategy {registration}: {registration.entry_point.value!r} is the class {plugin.__qualname__}, "
            f"expected a module or an instance; let the entry point name an object made from it"
        )
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        implementations = find_implementations(manager, registration, plugin)
    except StrategyError:
        raise
    except Exception as error:  # an object may do anything where it is looked at
        raise StrategyError(
            f"strategy {registration}: {_place(plugin)} can't be looked at: {type(error).__name__}: {error}; repair or "
            f"uninstall {registration.distribution}"
        ) from error
    missing = [hook for hook in REQUIRED_HOOKS if hook not in implementations]
    if missing:
        hint = "; a wrapper goes around one, and is none" if any(hasattr(plugin, hook) for hook in missing) else ""
        raise StrategyError(
            f"strategy {registration}: {' and '.join(missing)} must be implemented, found "
            f"{f'only {sorted(implementations)}' if implementations else 'no function marked with @hookimpl'}; "
            f"add it to {_place(plugin)}{hint}"
        )
    try:
        manager.register(plugin, name=registration.name)
    except pluggy.PluginValidationError as error:  # what pluggy does find: a wrapper that does not yield
        raise StrategyError(f"strategy {registration}: {' '.join(str(error).split())}") from error
    # A hook that the strategy answers is not also registered as a default: with firstresult, an answer of None would
    # call the next implementation too.
    left_out = [hook for hook in specifications() if hook not in implementations and hasattr(defaults, hook)]
    manager.register(SimpleNamespace(**{hook: getattr(defaults, hook) for hook in left_out}), name=defaults.__name__)
    return manager.hook


def find_implementations(manager: pluggy.PluginManager, registration: Registration, plugin: object) -> dict[str, Any]:
    """Return the plugin's hook implementations, checked, by the name of the hook; wrappers around one don't count."""
    specs = specifications()
    implementations: dict[str, Any] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            problem = _unmarked_problem(plugin, attribute) if attribute in specs else ""
            if problem:
                raise StrategyError(f"strategy {registration}: {problem}")
            continue
        function = getattr(plugin, attribute)
        hook = options["specname"] or attribute
        if hook not in specs:
            raise StrategyError(
                f"strategy {registration}: there is no hook {hook!r}, as which {_signature(attribute, function)} is "
                f"marked; hooks are {', '.join(specs)}{did_you_mean(hook, specs)}"
            )
        is_wrapper = options["wrapper"] or options["hookwrapper"]
        problem = _signature_problem(function, specs[hook], is_wrapper)
        if problem:
            raise StrategyError(f"strategy {registration}: {_signature(attribute, function)} {problem}")
        if is_wrapper:
            continue
        if hook in implementations:
            raise StrategyError(
                f"strategy {registration}: hook {hook!r} is implemented twice, by "
                f"{implementations[hook].__name__} and {attribute}; keep one"
            )
        implementations[hook] = function
    return implementations


def _unmarked_problem(plugin: object, name: str) -> str:
    """Return what is wrong with an attribute that bears a hook's name and is none to pluggy, or an empty string."""
    value = inspect.getattr_static(plugin, name)  # a property must not run
    value = getattr(value, "__func__", value)
    if isinstance(value, property) or getattr(value, f"{PROJECT}_impl", None):
        return f"{name} is a {type(value).__name__}, which is never called as a hook; write a plain function"
    if inspect.isroutine(value) and _defined_by(plugin, value):
        signature = _signature(name, getattr(plugin, name))
        return f"{signature} bears the name of a hook and is not marked; put @hookimpl above it, or rename it"
    return ""


def _signature_problem(function: Any, spec: Any, is_wrapper: bool) -> str:
    """Return what is wrong with an implementation's signature, or an empty string."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is a coroutine, expected a plain function; remove `async`"
    if inspect.isgeneratorfunction(function) and not is_wrapper:
        return (
            "is a generator, expected a function that returns; put @contextmanager under @hookimpl if it is to be one"
        )
    parameters = inspect.signature(function).parameters.values()
    allowed = list(inspect.signature(spec).parameters)
    expected = f"{spec.__name__}({', '.join(allowed)})"
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            return f"has the keyword-only argument {parameter.name!r}, which is never passed; write {expected}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            argument = parameter.replace(annotation=parameter.empty)
            return f"has the argument {argument}, which is never passed; write {expected}"
        if parameter.name not in allowed:
            return (
                f"has the argument {parameter.name!r}, which the hook lacks{did_you_mean(parameter.name, allowed)}; "
                f"write {expected}"
            )
    return ""


def _defined_by(plugin: object, function: Any) -> bool:
    """Tell a strategy's own function from one that it merely imported, such as a verb of parallel_core."""
    if inspect.ismodule(plugin):
        return bool(function.__module__ == plugin.__name__ or function.__module__.startswith(f"{plugin.__name__}."))
    return True


def _signature(name: str, function: Any) -> str:
    return f"{name}{inspect.signature(function)}"


def _place(plugin: object) -> str:
    return f"module {plugin.__name__}" if inspect.ismodule(plugin) else f"an object of {type(plugin).__qualname__}"
