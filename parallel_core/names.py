"""The bare model's names: what wrappers add to the path of a parameter is taken out again.

For strategy authors too. Always by the modules that stand there, never by the text: a user's own child may be called
`module` or `_orig_mod`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from torch import nn

__all__ = ["bare_modules", "bare_names", "uncompiled", "unwrapped"]


def _never(_module: nn.Module, _child: str) -> bool:
    return False


def bare_modules(
    model: nn.Module, is_wrapper: Callable[[nn.Module, str], bool] = _never
) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every module with its path in `model` and its path in the bare model, each with a final dot or empty.

    A module that stands in several places is yielded for each of them.

    Args:
        model: the module to walk through.
        is_wrapper: whether a module is a wrapper and the child of the given name what it wraps. The wrappers of
            `torch.compile` and of activation checkpointing are known already.
    """

    def walk(module: nn.Module, actual: str, bare: str) -> Iterator[tuple[str, str, nn.Module]]:
        yield actual, bare, module
        for name, child in module._modules.items():
            if child is not None:
                adds_nothing = name == _content_name(module) or is_wrapper(module, name)
                yield from walk(child, f"{actual}{name}.", bare if adds_nothing else f"{bare}{name}.")

    return walk(model, "", "")


def bare_names(model: nn.Module, is_wrapper: Callable[[nn.Module, str], bool] = _never) -> Callable[[str], str]:
    """Return the function that turns a name in `model` (a state-dict key, a parameter's name) into the bare name.

    The arguments are those of `bare_modules`.
    """
    paths = {actual: bare for actual, bare, _ in bare_modules(model, is_wrapper)}

    def bare_name(name: str) -> str:
        # The longest path that is a module's; what follows may have dots of its own, where a state-dict hook put them.
        owner = name
        while owner:
            owner = owner.rpartition(".")[0]
            path = f"{owner}." if owner else ""
            if path in paths:
                return paths[path] + name[len(path) :]
        return name

    return bare_name


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of `torch.compile`, or the module itself."""
    # Not hasattr(model, "_orig_mod"): a wrapper that forwards attributes would answer for the module inside of it.
    while _is_compiled(model):
        model = model._modules["_orig_mod"]  # type: ignore[assignment]  # never None in an OptimizedModule
    return model


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what is inside the wrappers of `torch.compile` and of activation checkpointing, or the module itself."""
    while name := _content_name(module):
        module = module._modules[name]  # type: ignore[assignment]  # never None in one of these wrappers
    return module


def _content_name(module: nn.Module) -> str | None:
    """Return the name of what a wrapper that adds nothing wraps; None for any other module."""
    if _is_compiled(module):
        return "_orig_mod"
    checkpointing = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if checkpointing is not None and isinstance(module, checkpointing.ActivationWrapper):
        return "_checkpoint_wrapped_module"
    return None


def _is_compiled(module: nn.Module) -> bool:
    # The compiler takes seconds to import; where nobody has done so, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
