"""A file of text that keeps its every byte: byte order mark, line ends, a missing last newline."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dgemma.durable_files import replacing
from dgemma.errors import DgemmaError, InputError

MAX_BYTES = 16 << 20
STDIN = "-"
_BOM = "\ufeff"


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A text as a model reads it, and what of the file that leaves out."""

    path: str  # STDIN: it came from there
    data: bytes
    text: str  # without a byte order mark; where all lines end with \r\n, they end with \n here
    has_bom: bool = False
    has_crlf: bool = False

    @property
    def name(self) -> str:
        return _name(self.path)

    def as_written(self, text: str) -> str:
        """A part of a text in this file's line ends."""
        return text.replace("\r", "").replace("\n", "\r\n") if self.has_crlf else text

    def whole(self, text: str) -> str:
        """All characters of the file, if `text` stood in it."""
        return (_BOM if self.has_bom else "") + self.as_written(text)

    def offset(self, text: str, at: int) -> int:
        """Where character `at` of `text` would stand in the file."""
        return len(self.whole(text[:at]))


def read_text_file(path: str) -> TextFile:
    """The file, or stdin; what is no text of a model's size is refused by name."""
    data = _read(path)
    name = _name(path)
    nul = data.find(b"\0")
    if nul >= 0:
        raise InputError(
            f"{name} is not text: byte {nul} is NUL. If it is UTF-16, convert it to UTF-8 first."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; "
            "convert it first, for example with iconv."
        ) from None
    has_bom = text.startswith(_BOM)
    text = text.removeprefix(_BOM)
    has_crlf = 0 < text.count("\r\n") == text.count("\n") == text.count("\r")
    return TextFile(
        path=path,
        data=data,
        text=text.replace("\r\n", "\n") if has_crlf else text,
        has_bom=has_bom,
        has_crlf=has_crlf,
    )


def lines_of(text: str) -> list[str]:
    r"""With their ends, which are \n alone: a form feed does not end a line."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def check_writable(path: str) -> None:
    """Refuse now what could not be written after long work."""
    if path == STDIN:
        raise InputError("--write needs a file; what came from stdin has no place to be written to.")
    file = Path(os.path.realpath(path))
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is not a regular file; --write needs one.")
    # os.replace checks only the directory's permissions; a read-only file must be refused here.
    if not mode & 0o222 or not os.access(file, os.W_OK):
        raise InputError(f"{path} cannot be written: it is read-only.")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: {file.parent} takes no new files.")


def write_text_file(file: TextFile, text: str) -> None:
    """`text` in place of the file's own, at once or not at all; its mode and owner stay."""
    target = Path(os.path.realpath(file.path))  # a link stays a link
    try:
        before = target.stat()
        if target.read_bytes() != file.data:
            raise DgemmaError(f"{file.path} was changed meanwhile; nothing was written. Run it again.")
        with replacing(target) as out:
            if hasattr(os, "chown"):
                with suppress(OSError):  # another's file, which we may write but not give away
                    os.chown(out.name, before.st_uid, before.st_gid)
            os.chmod(out.name, stat.S_IMODE(before.st_mode))  # before the text, which may be private
            out.write(file.whole(text).encode())
    except OSError as error:
        raise DgemmaError(f"{file.path} cannot be written: {error.strerror}.") from None


def _read(path: str) -> bytes:
    try:
        if path == STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            if path and Path(path).is_dir():
                raise InputError(f"{path} is a directory; give a file of text.")
            with open(path, "rb") as file:
                data = file.read(MAX_BYTES + 1)
    except ValueError as error:  # a name with a NUL in it
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path!r} is not the name of a file.") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{_name(path)} has more than {MAX_BYTES >> 20} MiB; give a part of it.")
    return data


def _unreadable(path: str, error: OSError) -> InputError:
    return InputError(f"{_name(path)} cannot be read: {error.strerror}.")


def _name(path: str) -> str:
    return "stdin" if path == STDIN else path or "''"
