"""A small language model over bytes, the text it learns from, and the text it writes.

A plain `nn.Module` and plain functions: nothing here knows that there are ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "test", "tests"}  # not a library's own text


class Block(nn.Module):
    """One layer of the decoder: attention to the bytes before, then a perceptron on each byte."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # [batch, length, 3 * width] -> three of [batch, heads, length, width / heads]
        q, k, v = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ByteLM(nn.Module):
    """A transformer decoder that predicts the next byte.

    Args:
        width: of the residual stream; a block has 12 times its square parameters.
        depth: the number of blocks.
        heads: of attention; must divide the width.
        context: how many bytes it sees at most.
    """

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte after each, [batch, length, 256], for bytes [batch, length]."""
        x = self.byte(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def read_text(source: Path, limit: int) -> torch.Tensor:
    """Return the bytes of a file, or of the text files of a folder in the order of their names, as uint8.

    Args:
        source: the file or folder; in a folder, hidden things, `SKIPPED_FOLDERS` and binary files are passed over.
        limit: how many bytes to read at most.
    """
    text = bytearray()
    for path in [source] if source.is_file() else _files(source):
        with path.open("rb") as file:
            content = file.read(limit - len(text))
        if b"\0" not in content:
            text += content
        if len(text) == limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        # In place, and sorted: this is where os.walk goes next.
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        paths = (Path(parent, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())  # not a link to nowhere, nor a pipe


def draw_batch(text: torch.Tensor, *, step: int, size: int, context: int, seed: int) -> torch.Tensor:
    """Return the windows of text for a step, [size, context + 1]: the same on every rank, and the same when resumed."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(text) - context, (size, 1), generator=generator)
    return text[starts + torch.arange(context + 1)].long()


@torch.no_grad()
def write_text(
    model: nn.Module,
    prompt: bytes,
    *,
    length: int,
    context: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
) -> str:
    """Return the prompt and what the model writes after it.

    A forward pass may be a collective: every rank must call this, and all of them draw the same bytes.

    Args:
        model: as it was trained, on any number of ranks.
        prompt: at least one byte.
        length: how many bytes to write.
        context: how many bytes the model sees at most.
        device: where it lies.
        seed: the same on every rank.
        temperature: above 0; the lower, the more likely the bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(text[:, -context:].to(device))[0, -1].float().cpu()
        drawn = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        text = torch.cat([text, drawn[None]], dim=1)
    written = bytes(text[0].tolist()).decode(errors="replace")
    # What a terminal would obey and not show.
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in written
    )
