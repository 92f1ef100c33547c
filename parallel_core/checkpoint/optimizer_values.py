"""What is saved of an optimizer besides its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from parallel_core.checkpoint.tree import decode, decode_each
from parallel_core.errors import CheckpointError


class OptimizerValues(msgspec.Struct, frozen=True):
    """The values of an optimizer's section, checked.

    Attributes:
        state: by the parameter's name and the optimizer's own key, each as `parallel_core.checkpoint.tree` has it.
        param_groups: the parameter groups, in the same way all at once.
    """

    state: dict[str, dict[str, Any]]
    param_groups: list[Any]

    @classmethod
    def of(cls, values: Any) -> OptimizerValues:
        """Return them as what they are.

        Raises:
            CheckpointError: they are something else.
        """
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"no state of an optimizer: {error}") from error

    def decoded(self, tensor: Callable[[str], Any]) -> dict[str, Any]:
        """Return the state dict, with what a function returns for a tensor of a name.

        Raises:
            CheckpointError: as `decode`.
        """
        return {
            "state": {name: decode_each(entries, tensor) for name, entries in self.state.items()},
            "param_groups": self.groups(tensor),
        }

    def groups(self, tensor: Callable[[str], Any]) -> list[dict[str, Any]]:
        """Return the parameter groups, with the names of the parameters.

        Raises:
            CheckpointError: as `decode`, or they are something else.
        """
        found = decode(self.param_groups, tensor)
        for group in found:
            names = group.get("params") if isinstance(group, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise CheckpointError(
                    f"param_groups: expected dicts that have a list of names as 'params', found {group!r:.80}"
                )
        return list(found)
