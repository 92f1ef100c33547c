"""Starting a model from the meta device: its tensors are made, and get their first values, module by module.

For strategy authors too. A model that was built under `torch.device("meta")` has shapes and no values. Here it gets
both in an order that does not depend on the strategy, and a strategy can take each part as soon as it is finished, so
that no rank ever holds the whole model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_core import ranks
from parallel_core.errors import WrapError
from parallel_core.meta_model import each_meta_tensor, own_meta_tensors, registered, reset_method
from parallel_core.state_dicts import named
from parallel_core.tensors import is_dtensor

__all__ = ["MetaStart"]

# What a new tensor is full of until it is written to: NaN for floating point. An allocator's leftovers could be taken
# for values, and could not be told from them.
UNWRITTEN = 0xFF


class MetaStart:
    """The start of one model from the meta device; a strategy gets it in the hook `wrap_meta_model`.

    Attributes:
        loads: whether a state dict is loaded right after the wrap. What it has then gets no values before that.
        wrap_model: calls the strategy's own hook `wrap_model` for the model, once that has no meta tensors any more.
    """

    def __init__(
        self, model: nn.Module, wrap_model: Callable[[nn.Module], nn.Module], loaded: Collection[str] | None = None
    ) -> None:
        self.loads = loaded is not None
        self.wrap_model = wrap_model
        self._path_of = {module: path for path, module in model.named_modules()}
        # All that is on the meta device without a state dict; with one, what that lacks.
        self._to_value: dict[nn.Module, set[str]] = {}
        for module, own, name, _ in each_meta_tensor(model):
            if loaded is None or name not in loaded:
                self._to_value.setdefault(module, set()).add(own)
        tensors = [tensor for part in self._path_of for kind in registered(part) for tensor in kind.values()]
        self._places = Counter(id(tensor) for tensor in tensors if tensor is not None and tensor.is_meta)
        self._shared: dict[int, torch.Tensor] = {}
        self._handed_over: set[int] = set()

    def materialise(
        self, model: nn.Module, finished: Callable[[nn.Module], nn.Module] = lambda module: module
    ) -> nn.Module:
        """Make the model's meta tensors on the CPU and give them their values; return what `finished` makes of it.

        The order is that in which constructors run: the children of a module first, as they were registered, then the
        module itself; a module that stands in several places once, at the first. A module with meta tensors of its own
        is reset by its `reset_parameters` (or `_reset_parameters`), which draws from the CPU's generator on any device,
        so that one seed gives one model. With a state dict only those are reset that own a tensor which it lacks.

        Tied tensors stay tied, dtypes and `requires_grad` stay as they are; parameters become new objects.

        Args:
            model: the bare model.
            finished: called for each module when it and all below it have their values; what it returns takes the
                module's place. A sharding strategy wraps its units here, before the next module is made.

        Raises:
            WrapError: a module did not give a value to every tensor that it has to.
        """
        return self._finish(model, finished, {})

    def _finish(
        self,
        module: nn.Module,
        finished: Callable[[nn.Module], nn.Module],
        done: dict[nn.Module, nn.Module],
    ) -> nn.Module:
        """Start a module and all below it, the innermost first; return what `finished` makes of it."""
        if module not in done:
            for name, child in list(module._modules.items()):
                if child is not None and (answer := self._finish(child, finished, done)) is not child:
                    setattr(module, name, answer)
            self._start(module)
            answer = done[module] = finished(module)
            if answer is not module:
                self._handed_over.update(id(parameter) for parameter in answer.parameters())
        return done[module]

    def _start(self, module: nn.Module) -> None:
        """Make the tensors of one module, and let it give them values."""
        made = {}
        for tensors in registered(module):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    made[name] = tensors[name] = self._made(tensor)
        to_value = self._to_value.get(module)
        if not to_value:
            return
        # It may fail on one rank alone, and the next collective comes soon.
        with ranks.agreement(WrapError):
            self._give_values(module, made, to_value)

    def _give_values(self, module: nn.Module, made: dict[str, torch.Tensor], to_value: set[str]) -> None:
        """Let one module give values to the tensors that were made for it.

        Raises:
            WrapError: it failed, or did not give values to all that it has to.
        """
        reset = reset_method(module)
        assert reset is not None  # check_start let the model pass
        with self._writing_to_no_shard(module):
            try:
                reset()
            except Exception as error:
                where = f"{self._path_of[module] or 'the model'!r} ({type(module).__name__})"
                raise WrapError(
                    f"{reset.__name__} of {where} failed with {type(error).__name__}: {error}; mend it, or pass a "
                    f"state dict; what it sets in its parts may be cut into shards already; this model has to be built "
                    f"again"
                ) from error
        for name in made:
            self._keep(module, name, made[name])
        # A tensor that is shared may have been written to by another module, and then has been.
        missing = {name for name in to_value if name in made and not _is_written(made[name])}
        missing |= {name for name, _ in own_meta_tensors(module)}
        if missing & to_value:
            path = self._path_of[module]
            left = [f"{path}.{name}" if path else name for name in sorted(missing & to_value)]
            raise WrapError(
                f"{reset.__name__} of {type(module).__name__} does not give values to all that it owns; "
                f"{named('left out', left)}; initialise it there, or build the model on a device; this model has to "
                f"be built again"
            )

    @contextmanager
    def _writing_to_no_shard(self, module: nn.Module) -> Iterator[None]:
        """Run a reset on the CPU, and refuse it if it writes to what a strategy has taken over already.

        That may be a shard: each rank would draw for its own part alone, and from then on another sequence.
        """
        taken = {
            f"{self._path_of[part]}.{name}": _memory(parameter)
            for part in module.modules()
            if part in self._path_of  # not a strategy's own, which may show the parameters under other names
            for name, parameter in part.named_parameters(recurse=False)
            if id(parameter) in self._handed_over or is_dtensor(parameter)
        }
        watch = _WriteWatch(taken)
        # Not on the device that the caller has made the default: that may be the meta device still.
        with torch.device("cpu"), torch.no_grad(), watch if taken else nullcontext():
            yield
        if watch.written:
            raise WrapError(
                f"{type(module).__name__} writes to parameters that are cut into shards already when it is reset; "
                f"{named('written to', watch.written)}; initialise them in their own modules, or build the model "
                f"on a device; this model has to be built again"
            )

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the CPU that takes the place of one on the meta device, the same in all its places."""
        made = self._shared.get(id(tensor))
        if made is None:
            made = torch.empty_like(tensor, device="cpu", requires_grad=False)
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(made.untyped_storage()).fill_(UNWRITTEN)
            if isinstance(tensor, nn.Parameter):
                made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
                vars(made).update(vars(tensor))  # marks that a user has put on it
        self._places[id(tensor)] -= 1
        if self._places[id(tensor)] > 0:
            self._shared[id(tensor)] = made
        else:
            self._shared.pop(id(tensor), None)  # what a strategy puts in its place must be able to free it
        return made

    def _keep(self, module: nn.Module, name: str, made: torch.Tensor) -> None:
        """Put a tensor back that a module has replaced by a new one, with that one's values: dtypes are the model's."""
        tensors = next((tensors for tensors in registered(module) if name in tensors), {})
        found = tensors.get(name)
        if found is made or found is None:
            return
        if found.is_meta or found.shape != made.shape:
            raise WrapError(
                f"{type(module).__name__} replaces {name!r} when it is reset: it had the shape {list(made.shape)}, and "
                f"has {list(found.shape)} on {found.device} now; fill the tensor in place; this model has to be built "
                f"again"
            )
        with torch.no_grad():
            made.copy_(found)
        tensors[name] = made


class _WriteWatch(TorchDispatchMode):
    """Notes which of some pieces of memory are written to, through whatever tensor: `.data` counts as no write else."""

    def __init__(self, watched: dict[str, range]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own is not annotated
        self._watched = watched
        self.written: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            **dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                to = _memory(value)
                found = (name for name, at in self._watched.items() if to.start < at.stop and at.start < to.stop)
                self.written.extend(name for name in found if name not in self.written)
        return func(*args, **(kwargs or {}))


def _memory(tensor: torch.Tensor) -> range:
    """Return where a tensor's own memory on this rank lies, in bytes; empty for a shard without elements."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    if not local.numel():
        return range(0)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return range(local.data_ptr(), local.data_ptr() + elements * local.element_size())


def _is_written(tensor: torch.Tensor) -> bool:
    # Filling the storage has not counted as a write; writing through `.data` does not either, hence the bytes.
    return tensor._version > 0 or tensor.numel() == 0 or bool((ranks.bits(tensor) != UNWRITTEN).any())
