"""The modules of the tiny models."""

# mypy: disable-error-code="no-any-return"
# For a type checker, calling a module gives Any.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 13


class Residual(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.body = nn.Sequential(Residual())
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


class TiedInBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Residual(), Residual()
        self.right.up.weight = self.left.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.first = nn.Sequential(nn.Linear(6, 6), shared)
        self.second = nn.Sequential(nn.Linear(6, 6), shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class SmallParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(1))
        self.shift = nn.Parameter(torch.randn(1, 6))
        self.pair = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x + self.shift).repeat(1, 3) * self.gain


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without biases: a key's bias has no gradient but rounding, of which AdamW makes steps of full size.
        self.attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.attention(x, x, x, need_weights=False)[0])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Adapter(nn.Module):
    """A frozen layer with a low-rank part that trains, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Buffers(nn.Module):
    offset: Tensor
    order: Tensor
    mask: Tensor
    seen: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("offset", torch.randn(6))
        self.register_buffer("order", torch.randperm(6))
        self.register_buffer("mask", torch.rand(6) > 0.3)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.arange(6.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.layer(x[:, self.order].masked_fill(~self.mask, 0.0) + self.offset + self.scratch)


class ExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.note = {"scale": 2.0}

    def get_extra_state(self) -> dict[str, float]:
        return self.note

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.note = state

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.note["scale"]


class OwnNames(nn.Module):
    """Children that are called what wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"_orig_mod": nn.Linear(6, 6), "_fsdp_wrapped_module": Residual()})

    def forward(self, x: Tensor) -> Tensor:
        return self.module["_fsdp_wrapped_module"](self.module["_orig_mod"](x))


class UnusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.spare = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class ScalarParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.temperature = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.temperature


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 6).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).to(torch.bfloat16)).float()


class BuffersOnly(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale
