"""How functions and their results cross between processes: pickled bytes, no shared memory."""

from __future__ import annotations

import io
import marshal
import pickle
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

try:
    import cloudpickle  # type: ignore[import-untyped]  # it has no annotations
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "parallel_core.testing needs cloudpickle, which is not installed: pip install 'parallel-core[testing]'",
        name=error.name,
    ) from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # its base is untyped
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            # cloudpickle drops the name of the file, and with it the source lines in tracebacks and the coverage.
            return marshal.loads, (marshal.dumps(value),)
        torch = sys.modules.get("torch")
        plain = torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)
        if plain and (value.device.type != "cpu" or not value.is_leaf):
            # A tensor outlives its graph, and whoever gets it may have no such device.
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def packed(value: object) -> bytes:
    """Pickle a value, functions and classes included, for a process on the same interpreter."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """Unpickle what came through a channel that only the pool and its own workers hold."""
    return pickle.loads(data)  # noqa: S301 - not read from a file or a network


def packed_function(
    function: Callable[..., Any], args: Any, kwargs: Any, *, by_value: Iterable[ModuleType] = ()
) -> bytes:
    """Pickle a function with its arguments, whole where a worker could not import it.

    Args:
        function: nested functions, closures and lambdas too.
        args: its positional arguments.
        kwargs: its keyword arguments.
        by_value: modules whose functions and classes are sent whole; the function's own joins them if it can't be
            imported.

    Raises:
        TypeError: something can't be pickled.
    """
    __tracebackhide__ = True
    modules = {module.__name__: module for module in by_value if sys.modules.get(module.__name__) is module}
    own = sys.modules.get(getattr(_innermost(function), "__module__", None) or "")
    if own is not None and own.__name__ not in modules and not _importable(own):
        modules[own.__name__] = own
    with ExitStack() as stack:
        for module in modules.values():
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            return packed((function, args, kwargs))
        except Exception as error:
            raise TypeError(
                f"{name_of(function)} can't be sent to the ranks: pickling it with all that it refers to failed with "
                f"{type(error).__name__}: {error}; make such objects inside the function"
            ) from error


def name_of(function: Callable[..., Any]) -> str:
    """Return the name that a report gives a function."""
    return getattr(_innermost(function), "__qualname__", None) or repr(function)


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _importable(module: ModuleType) -> bool:
    """Tell whether a fresh interpreter would find this very module under its name."""
    path = None
    spec = None
    parts = module.__name__.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _found(".".join(parts[:depth]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(module.__spec__, "origin", None)


def _found(name: str, path: Any) -> ModuleSpec | None:
    # importlib.util.find_spec answers from sys.modules, where pytest has put modules that only pytest could load.
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, path) if find_spec is not None else None
        if isinstance(spec, ModuleSpec):
            return spec
    return None


def packed_result(value: Any) -> bytes:
    """Pickle what a function returned.

    Raises:
        TypeError: it can't be pickled.
    """
    try:
        return packed(value)
    except Exception as error:
        raise TypeError(
            f"the result of type {type(value).__name__} can't be sent back from the rank: pickling it failed with "
            f"{type(error).__name__}: {error}; return plain values and tensors"
        ) from error


def packed_exception(error: BaseException) -> bytes | None:
    """Pickle an exception without its traceback, or return None where it does not survive that."""
    try:
        data = packed(error)
        unpacked(data)
    except Exception:  # whatever an exception's own way of being pickled raises
        return None
    return data
