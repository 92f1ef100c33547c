"""Whether `fully_shard` can make of a module what it makes of each unit: an instance of a class of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import _unimplemented_deepcopy, get_cls_to_fsdp_cls

# The methods that a unit gets, and by which it is spoken to.
_METHODS = frozenset(dir(FSDPModule)) - frozenset(dir(nn.Module))


def class_problems(units: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Yield why modules can't become units, found before any of them is touched.

    Args:
        units: the modules with their names; the root's is empty.
    """
    for name, module in units:
        where = f"{name or 'the model'!r}"
        own = {*vars(module), *module._parameters, *module._buffers, *module._modules, *dir(type(module))}
        if taken := sorted(_METHODS & own):
            yield f"{where} has an attribute {taken[0]!r}, which is the name of a method of FSDPModule; rename it"
        kind, made = type(module), get_cls_to_fsdp_cls()
        try:
            # Where fully_shard will look for it: to some classes, such as those of a registry, a second one of its name
            # is too many.
            if kind not in made:
                made[kind] = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__deepcopy__": _unimplemented_deepcopy})
            module.__class__ = kind  # as it is; one that can't be changed refuses even that
        except Exception as error:  # whatever a class raises that will not be inherited from
            yield (
                f"{where} is a {kind.__name__}, of which fully_shard can't make a class of its own: "
                f"{type(error).__name__}: {error}; use strategy fsdp or ddp for it"
            )
