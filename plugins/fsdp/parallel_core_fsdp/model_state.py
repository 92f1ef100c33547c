"""The model's state dicts, read and loaded unit by unit, so that no more than one unit is ever whole on a rank.

torch's own state dicts are not used: on the CPU a full one with offload reads freed memory (pytorch#188989, fixed in
2.14), one without gives every rank the whole model, and a sharded one gathers all units at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from parallel_core import StateDictType, ranks, tensors
from parallel_core.names import bare_modules, bare_names
from parallel_core.record import bare_state, has_extra_state, parameter_names
from parallel_core_fsdp.stepping import prepare


def read(model: nn.Module, state_dict_type: StateDictType) -> dict[str, Any]:
    """Return the model's state dict; see the hook `model_state_dict`."""
    entries: dict[str, Any] = {}
    mesh_on = functools.cache(mesh_of_all_ranks)
    for names, parameter in _whole_parameters(model, writeback=False):
        if state_dict_type is StateDictType.SHARDED:
            entries |= dict.fromkeys(names, tensors.shard(parameter, mesh_on(parameter.device.type)))
        else:
            # A copy for each name: tensors that share memory can't be saved as safetensors.
            entries |= {name: tensors.snapshot(parameter) for name in names}
    for name, buffer in buffers(model):
        entries[name] = tensors.entry(buffer, state_dict_type)
    for name, module in _modules_with_extra_state(model):
        entries[name] = tensors.entry(module.get_extra_state(), state_dict_type)
    return {} if state_dict_type is StateDictType.FULL and ranks.rank() else entries


def load(model: nn.Module, state_dict: dict[str, Any], state_dict_type: StateDictType) -> None:
    """Load a state dict; see the hook `load_model_state_dict`."""
    for names, parameter in _whole_parameters(model, writeback=True):
        # The names of a tied parameter have equal values, and not all of them need to be there.
        for name in names:
            if name in state_dict:
                tensors.assign(parameter, state_dict[name], state_dict_type)
                break
    for name, buffer in buffers(model):
        if name in state_dict:
            tensors.assign(buffer, state_dict[name], state_dict_type)
    for name, module in _modules_with_extra_state(model):
        if name in state_dict:
            module.set_extra_state(state_dict[name])


def names_of_nobody(model: nn.Module) -> list[str]:
    """Return the names in a bare model's state dict that `read` would not find: those that a hook has put there."""
    bare = bare_names(model)
    known = {bare(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in buffers(model)} | {name for name, _ in _modules_with_extra_state(model)}
    return [name for name in bare_state(model) if name not in known]


def mesh_of_all_ranks(device_type: str) -> DeviceMesh:
    """Return the mesh that DTensors are cut over; a collective, so that it is made once for a whole state dict."""
    return init_device_mesh(device_type, (ranks.world_size(),))


def is_wrapper(module: nn.Module, child: str) -> bool:
    """Tell the path parts that FSDP1 adds from the user's own."""
    return isinstance(module, FullyShardedDataParallel) and child == "_fsdp_wrapped_module"


def _whole_parameters(model: nn.Module, *, writeback: bool) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield every parameter with all its bare names, whole on every rank until the next one is asked for.

    A collective; changes to the tensor are kept with `writeback`.
    """
    names = parameter_names(model)
    prepare(model)
    # The root comes first: it is what prepares all of them, where no forward has done so yet.
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=writeback):
            for parameter in dict.fromkeys(_own_parameters(unit)):
                yield names[parameter], parameter.detach()


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters below a unit that are in no unit inside of it."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _own_parameters(child)


def buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers with their bare names."""
    for _, path, module in bare_modules(model, is_wrapper):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}{name}", buffer


def _modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for _, path, module in bare_modules(model, is_wrapper):
        if has_extra_state(module):
            yield f"{path}_extra_state", module
