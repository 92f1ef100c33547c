"""State as JSON: what a state dict is made of, and comes back as, with the tensors kept elsewhere.

JSON's own kinds stand for themselves. What it lacks is a dict of one key that begins with `$`: `{"$tuple": [...]}`.
Nothing else is taken, so that reading can't run code: there is no way to name a class.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from parallel_core.errors import CheckpointError

TENSOR = "$tensor"

_LARGEST = 8192  # bits of an integer: Python refuses to read one of more than 4300 digits
_TOO_DEEP = "nested too deep: lists in lists, or dicts in dicts"

Keep = Callable[[str, Any], str]
"""Called with the place of a tensor in the state and the tensor; returns the name it is kept under."""


def encode(value: Any, where: str, keep: Keep | None = None) -> Any:
    """Return a value as JSON can say it.

    A dict by names of somebody else's is encoded name by name: one of them may begin with `$`.

    Args:
        value: made of dicts, lists, tuples, numbers, strings, bytes and None, with tensors among them.
        where: what errors call the value.
        keep: keeps the tensors; without it they are refused.

    Raises:
        CheckpointError: there is something else in it, or it is nested deeper than Python goes.
    """
    try:
        return _encoded(value, where, keep)
    except RecursionError:
        raise CheckpointError(f"{where}: {_TOO_DEEP}") from None


def _encoded(value: Any, where: str, keep: Keep | None) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > _LARGEST:
            raise CheckpointError(
                f"{where}: found an integer of {value.bit_length()} bits, expected at most {_LARGEST}"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{where}: {value!r} is no text that JSON can hold: {error.reason}") from None
        return str(value)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_encoded(item, f"{where}[{index}]", keep) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_encoded(item, f"{where}[{index}]", keep) for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [(key, _encoded(item, f"{where}[{key!r}]", keep)) for key, item in value.items()]
        for key in value:
            _encoded(key, f"{where}: the key {key!r}", None)
        if type(value) is not Counter and all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        kind = "$counter" if type(value) is Counter else "$dict"
        return {kind: [[_encoded(key, f"{where}: the key {key!r}", None), item] for key, item in pairs]}
    if keep is not None and _is_tensor(value):
        if value.is_meta:
            raise CheckpointError(f"{where}: found a tensor on the meta device, which has no values to save")
        return {TENSOR: keep(where, value)}
    hint = "; call .tolist() or .item()" if _is_tensor(value) or hasattr(value, "tolist") else ""
    raise CheckpointError(
        f"{where}: found {type(value).__module__}.{type(value).__qualname__}, which can't be saved without pickle; "
        f"possible are dicts, lists, tuples, numbers, strings, bytes{', tensors' if keep else ''} and None{hint}"
    )


def decode(node: Any, tensor: Callable[[str], Any] | None = None) -> Any:
    """Return the value that `encode` was given.

    Args:
        node: what `encode` returned.
        tensor: returns the tensor that was kept under a name.

    Raises:
        CheckpointError: `encode` does not return such a thing.
    """
    try:
        return _decoded(node, tensor)
    except RecursionError:
        raise CheckpointError(_TOO_DEEP) from None


def decode_each(nodes: Mapping[str, Any] | None, tensor: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return the values that `encode` was given one by one, by the names that they have."""
    return {name: decode(node, tensor) for name, node in (nodes or {}).items()}


def _decoded(node: Any, tensor: Callable[[str], Any] | None) -> Any:
    if isinstance(node, list):
        return [_decoded(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    kind = next(iter(node), "")
    if len(node) != 1 or not kind.startswith("$"):
        return {key: _decoded(item, tensor) for key, item in node.items()}
    content = node[kind]
    try:
        match kind:
            case "$tensor" if tensor is not None and isinstance(content, str):
                return tensor(content)
            case "$float":
                return float(content)
            case "$bytes":
                return base64.b64decode(content, validate=True)
            case "$tuple":
                return tuple([_decoded(item, tensor) for item in content])
            case "$dict":
                return {_decoded(key, None): _decoded(item, tensor) for key, item in content}
            case "$counter":
                return Counter({_decoded(key, None): _decoded(item, tensor) for key, item in content})
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{kind} with {content!r:.80}: {error}") from error
    raise CheckpointError(f"{kind!r} stands for nothing that this version knows")


def tensor_names(node: Any) -> list[str]:
    """Return the names of the tensors that a value refers to."""
    if isinstance(node, list):
        return [name for item in node for name in tensor_names(item)]
    if not isinstance(node, dict):
        return []
    if set(node) == {TENSOR}:
        return [node[TENSOR]]
    return tensor_names_of_each(node)


def tensor_names_of_each(nodes: Mapping[str, Any] | None) -> list[str]:
    """Return the names of the tensors that values refer to, whatever names they have themselves."""
    return [name for node in (nodes or {}).values() for name in tensor_names(node)]


def _is_tensor(value: object) -> bool:
    import torch  # here, so that a checkpoint can be looked at without it

    return isinstance(value, torch.Tensor)
