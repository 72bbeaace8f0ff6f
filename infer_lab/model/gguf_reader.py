"""The layout of a GGUF file: where its values and tensors lie, checked against the file's size.

    "GGUF" | version | counts | key = value ... | name, shape, type, offset ... | padding | tensors

A file from elsewhere may be cut short, or claim an array of 2**60 items. So every read goes
through `_Cursor`, which asks whether the bytes are there before it takes them; the work is
bounded by the size of the file, whatever the file says.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as TensorType
from numpy.typing import NDArray

# GGUF's number for the type of a value -> struct's letter, numpy's name.
_SCALARS = {
    0: ("B", "u1"), 1: ("b", "i1"), 2: ("H", "u2"), 3: ("h", "i2"), 4: ("I", "u4"), 5: ("i", "i4"),
    6: ("f", "f4"), 7: ("?", "?"), 10: ("Q", "u8"), 11: ("q", "i8"), 12: ("d", "f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its shape with rows first, its type, and its bytes in the file."""

    shape: tuple[int, ...]
    type: TensorType
    start: int
    num_bytes: int


class GGUFFile:
    """The metadata of a GGUF file and its tensors, dequantized one at a time.

    Raises:
        ValueError: this is not a whole GGUF file (the message does not name it; callers do).
    """

    def __init__(self, path: Path) -> None:
        if path.stat().st_size < 24:
            raise ValueError(f"it has only {path.stat().st_size} bytes")
        self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(self._data)
        if cursor.take(4) != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        version = cursor.number("I")
        if version not in (2, 3):
            raise ValueError(f"its version must be 2 or 3 (little-endian), got {version}")
        num_tensors, num_values = cursor.number("Q"), cursor.number("Q")

        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            if key in self.metadata:
                raise ValueError(f"key {key!r} occurs twice")
            self.metadata[key] = cursor.value(cursor.number("I"))

        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = cursor.string()
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} occurs twice")
            self.tensors[name] = cursor.tensor_info(name)
        self._place_tensors(cursor.position)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Tensor `name` in float32, in its own shape; a fresh array."""
        info = self.tensors[name]
        raw = self._data[info.start : info.start + info.num_bytes]
        values = np.array(gguf.quants.dequantize(raw, info.type), dtype=np.float32)
        return values.reshape(info.shape)

    def _place_tensors(self, end_of_header: int) -> None:
        """Turn offsets into positions in the file; see that every tensor is there and readable."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment must be a power of two, got {alignment!r}")
        first = math.ceil(end_of_header / alignment) * alignment
        for name, info in self.tensors.items():
            start = first + info.start
            if start + info.num_bytes > self._data.size:
                raise ValueError(
                    f"tensor {name!r} would end at byte {start + info.num_bytes:,}, but the file "
                    f"has {self._data.size:,} bytes; it was cut short or damaged"
                )
            self.tensors[name] = TensorInfo(info.shape, info.type, start, info.num_bytes)
        for kind in {info.type for info in self.tensors.values()}:
            try:
                one_block = np.zeros(gguf.GGML_QUANT_SIZES[kind][1], dtype=np.uint8)
                gguf.quants.dequantize(one_block, kind)
            except NotImplementedError as error:
                raise ValueError(f"tensors of type {kind.name} cannot be dequantized") from error


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        left = self._data.size - self.position
        if count > left:
            raise ValueError(
                f"the header wants {count:,} bytes at byte {self.position:,}, {left:,} are left; "
                "it was cut short or damaged"
            )
        self.position += count
        return self._data[self.position - count : self.position].tobytes()

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def string(self) -> str:
        start = self.position
        try:
            return self.take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the string at byte {start:,} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_scalar(kind)[0])
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        dtype = np.dtype("<" + _scalar(kind)[1])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype).tolist()

    def tensor_info(self, name: str) -> TensorInfo:
        """The entry that follows a tensor's name; `start` still counts from the first tensor."""
        num_dims = self.number("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"tensor {name!r} must have 1 to 4 dimensions, got {num_dims}")
        shape = tuple(self.number("Q") for _ in range(num_dims))[::-1]  # the file: columns first
        number, start = self.number("I"), self.number("Q")
        if number not in TensorType.__members__.values():
            raise ValueError(f"tensor {name!r} has unknown type {number}")
        kind = TensorType(number)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_size:
            raise ValueError(
                f"tensor {name!r} of type {kind.name} and shape {shape} must have a whole number "
                f"of blocks of {block_size} in each row"
            )
        return TensorInfo(shape, kind, start, math.prod(shape) // block_size * block_bytes)


def _scalar(kind: int) -> tuple[str, str]:
    if kind not in _SCALARS:
        raise ValueError(f"unknown type of value {kind}")
    return _SCALARS[kind]
