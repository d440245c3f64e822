"""Scalars for TensorBoard: an event file in its format, written without it. No torch.

A file is a row of records, each with its length and two checksums; a record is an `Event` in protobuf's wire
format, of which four kinds of field are enough: varint, double, float, bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from dgemma.errors import CheckpointError

_PREFIX = "events.out.tfevents."
_SECONDS_BETWEEN_FLUSHES = 5.0
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # protobuf's wire types
_SESSION_START = 1


class EventFile:
    """A new file of a run that goes on from `start_step`.

    It begins with the word that a session starts, upon which TensorBoard forgets all later steps that files
    from before have in this directory: they are run again.
    """

    def __init__(self, directory: Path, *, start_step: int = 0) -> None:
        now = time.time()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names: ours has to be the last one, even if two
            # runs begin in one second, or the clock was set back.
            earlier = [_time_of(file) for file in directory.glob(f"{_PREFIX}*")]
            second = max([int(now), *(t + 1 for t in earlier)])
            self.path = directory / f"{_PREFIX}{second:010d}.{socket.gethostname()}"
            self._file = open(self.path, "xb")  # noqa: SIM115
        except OSError as error:
            raise _unwritable(directory, error) from error
        self._write(_event(now, 0) + _bytes(3, b"brain.Event:2"))
        # TensorBoard drops steps from the session's first one on; before step 1 there may be a step 0.
        first_step = start_step + 1 if start_step else 0
        self._write(_event(now, first_step) + _bytes(7, _field(1, _VARINT) + _varint(_SESSION_START)))
        self.flush()

    def scalars(self, step: int, values: Mapping[str, float], *, wall_time: float | None = None) -> None:
        """Values of one step. They are on the disk after some seconds, or after `flush`."""
        if not values:
            return
        wall_time = time.time() if wall_time is None else wall_time
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode("utf-8", "replace")) + _field(2, _FLOAT) + _float(value))
            for tag, value in values.items()
        )
        self._write(_event(wall_time, step) + _bytes(5, summary))
        if time.monotonic() - self._flushed >= _SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._flushed = time.monotonic()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        try:
            self._file.write(length + _checksum(length) + event + _checksum(event))
        except OSError as error:
            raise _unwritable(self.path, error) from error


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be written: {error.strerror}. Make room, or choose another directory."
    )


def _time_of(file: Path) -> int:
    digits = file.name.removeprefix(_PREFIX).partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _event(wall_time: float, step: int) -> bytes:
    return _field(1, _DOUBLE) + struct.pack("<d", wall_time) + _field(2, _VARINT) + _varint(step)


def _field(number: int, wire_type: int) -> bytes:
    return bytes([number << 3 | wire_type])


def _bytes(number: int, content: bytes) -> bytes:
    return _field(number, _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # so a negative number has its two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # past float32, as a diverging run may be
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _checksum(data: bytes) -> bytes:
    """The data's CRC-32C, masked: a checksum of data that holds checksums would be weak."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
