"""Write a GGUF file: metadata, the table of tensors, their bytes one tensor at a time. Imports no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.durable_files import replacing
from dgemma.errors import CheckpointError
from dgemma.gguf_file import ALIGNMENT, ARRAY, BOOL, GGML_TYPES, MAGIC, STRING, TYPE_NUMBERS, VERSION

_UINT32, _INT32, _FLOAT32 = 4, 5, 6


@dataclass(frozen=True)
class GgufTensorToWrite:
    """A tensor of a file. `chunks` is called when its bytes are written."""

    name: str
    type: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Any]]

    @property
    def nbytes(self) -> int:
        known = GGML_TYPES[TYPE_NUMBERS[self.type]]
        return math.prod(self.shape) // known.block_len * known.block_bytes


def write_gguf_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Sequence[GgufTensorToWrite],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write one file. It gets its name only when it is complete and on disk.

    Whole numbers are written as uint32 (in lists as int32), numbers as float32.
    """
    try:
        with replacing(path) as file:
            file.write(_header(metadata, tensors))
            for tensor in tensors:
                written = 0
                for chunk in tensor.chunks():
                    written += file.write(chunk)
                    if on_bytes is not None:
                        on_bytes(memoryview(chunk).nbytes)
                assert written == tensor.nbytes, (tensor.name, written, tensor.nbytes)
                file.write(bytes(-written % ALIGNMENT))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error


def _header(metadata: Mapping[str, Any], tensors: Sequence[GgufTensorToWrite]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        try:
            kind, data = _value(value)
        except (struct.error, OverflowError, UnicodeEncodeError):
            raise CheckpointError(f"{key} is {value!r:.40}, which a GGUF file cannot hold.") from None
        parts += [_text(key), struct.pack("<I", kind), data]
    offset = 0
    for tensor in tensors:
        lengths = tensor.shape[::-1]
        parts += [_text(tensor.name), struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths)]
        parts.append(struct.pack("<IQ", TYPE_NUMBERS[tensor.type], offset))
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % ALIGNMENT)


def _value(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return BOOL, struct.pack("<B", value)
        case int():
            return _UINT32, struct.pack("<I", value)
        case float():
            return _FLOAT32, struct.pack("<f", value)
        case str():
            return STRING, _text(value)
        case _:
            kind = _value(value[0])[0]
            if kind == STRING:
                items = b"".join(map(_text, value))
            else:
                kind = _INT32 if kind == _UINT32 else kind
                items = struct.pack(f"<{len(value)}{ {BOOL: 'B', _INT32: 'i', _FLOAT32: 'f'}[kind] }", *value)
            return ARRAY, struct.pack("<IQ", kind, len(value)) + items


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
