"""The safetensors format: a header that names tensors, and their bytes. No torch is needed to read a header.

The safetensors package is not used to write, because it wants all tensors of a file in memory, nor to read, because it
maps the file: a file that shrinks under a mapping ends the process. Files written here open with it.

Nor are the `HuggingFaceStorageWriter` and `Reader` of torch.distributed.checkpoint: the writer serialises all that goes
into one file in memory, stores no more than one box of a tensor in a file (a part of an FSDP1 unit is none), and
neither notices a changed byte.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parallel_core.checkpoint.untrusted import parsed
from parallel_core.errors import CheckpointError

# The names that torch has for dtypes, and the format's, with the number of bytes of an element.
CODES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
}
# What the format has no code for is stored as bytes, with one dimension more.
AS_BYTES = {"complex128": 16}
SIZES = {**{name: size for name, (_, size) in CODES.items()}, **AS_BYTES}
NAMES = {code: name for name, (code, _) in CODES.items()}

LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
METADATA = "__metadata__"


class TensorInfo(msgspec.Struct, frozen=True):
    """What is known of a tensor without its values.

    Attributes:
        dtype: torch's name for it (`float32`).
        shape: of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes its elements take."""
        return math.prod(self.shape) * SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Entry(msgspec.Struct, frozen=True):
    """A tensor in a header: the format's code for its dtype, its shape, and where its bytes begin and end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Header:
    """A header that has been read and checked.

    Attributes:
        entries: what the file has, by name, in the order of the bytes.
        metadata: what was noted besides.
        start: where the bytes begin that offsets count from.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]
    start: int

    def info(self, name: str) -> TensorInfo:
        """Return what a tensor of the file is, by the file alone."""
        entry = self.entries[name]
        return TensorInfo(NAMES[entry.dtype], entry.shape)


def stored(info: TensorInfo) -> tuple[str, tuple[int, ...]]:
    """Return the code and the shape under which a tensor stands in a file."""
    if info.dtype in AS_BYTES:
        return "U8", (*info.shape, AS_BYTES[info.dtype])
    return CODES[info.dtype][0], info.shape


def file_order(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Return the order in which tensors stand in a file: large elements first, so that all are aligned in memory."""
    return sorted(infos, key=lambda name: -1 if infos[name].dtype in AS_BYTES else -SIZES[infos[name].dtype])


def encode_header(infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a file that has these tensors, in `file_order`, right behind each other."""
    header: dict[str, Entry | dict[str, str]] = {METADATA: {"format": "pt", **metadata}}
    end = 0
    for name in file_order(infos):
        code, shape = stored(infos[name])
        header[name] = Entry(code, shape, (end, end := end + infos[name].nbytes))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: int, path: Path) -> Header:
    """Return the header of an open file.

    Args:
        file: its descriptor.
        path: what errors call it.

    Raises:
        CheckpointError: it is no safetensors file, or not a whole one.
    """
    try:
        size = os.fstat(file).st_size
        length = int.from_bytes(os.pread(file, 8, 0), "little")
        text = os.pread(file, min(length, LARGEST_HEADER), 8)
    except OSError as error:  # a folder can be opened, and not read
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        raise CheckpointError(f"{path}: no safetensors file, or cut off: it has {size} bytes")
    problem = f"{path}: the header is not that of a safetensors file"
    raw = parsed(text, dict[str, msgspec.Raw], problem)
    metadata = parsed(raw.pop(METADATA, msgspec.Raw(b"{}")), dict[str, str], problem)
    entries = {name: parsed(entry, Entry, problem) for name, entry in raw.items()}
    entries = dict(sorted(entries.items(), key=lambda item: item[1].data_offsets))
    end = 0
    for name, entry in entries.items():
        if entry.dtype not in NAMES:
            raise CheckpointError(f"{path}: {name!r} has the dtype {entry.dtype!r}; known are {', '.join(NAMES)}")
        nbytes = TensorInfo(NAMES[entry.dtype], entry.shape).nbytes
        if min(entry.shape, default=0) < 0 or entry.data_offsets != (end, end + nbytes):
            raise CheckpointError(
                f"{path}: the header gives {name!r} the bytes {list(entry.data_offsets)}, where {nbytes} from {end} on "
                f"are expected"
            )
        end += nbytes
    if 8 + length + end != size:
        raise CheckpointError(f"{path}: {size} bytes where the header tells of {8 + length + end}: not a whole file")
    return Header(entries, metadata, 8 + length)
