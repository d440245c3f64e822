"""Plain text files as training data: each file is a document, presented in windows.

A document's tokens, followed by an eos, are divided into windows of at most `max_length - 1` tokens. All
tokens of a window are supervised, after a bos. In every epoch each token is in exactly one window. The
borders differ between epochs, so that canvases do not always begin at the same tokens.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dgemma.errors import InputError
from dgemma.training.data.order import Purpose, below
from dgemma.training.data.records import Progress, RecordReader, RecordReading, Span, TrainingExample

_READ_BYTES = 1 << 20
# A chunk ends at a line end, if there is one within so many characters.
MAX_CHUNK_CHARS = 2 << 20
# White space may belong to the same token as the character before it.
_BORDER = re.compile(r"\n(?=\S)")


@dataclass(frozen=True, kw_only=True)
class WindowLayout:
    """A document of `length` tokens in windows of at most `size`.

    The first window is `shift` tokens shorter than the others; the last has the remaining tokens. A shift of
    at most `slack` needs no extra window, a larger one needs one more. The number of windows must be the same
    in all epochs, so a document uses the larger of the two ranges: at least half of all shifts.
    """

    length: int
    size: int

    @property
    def _slack(self) -> int:
        return -self.length % self.size

    @property
    def _has_one_more(self) -> bool:
        return self.length > self.size and self._slack + 1 < self.size - 1 - self._slack

    @property
    def count(self) -> int:
        return -(-self.length // self.size) + self._has_one_more

    @property
    def shifts(self) -> range:
        if self.length <= self.size:
            return range(1)
        return range(self._slack + 1, self.size) if self._has_one_more else range(self._slack + 1)

    def window(self, number: int, shift: int) -> tuple[int, int]:
        """[start, stop) of a window."""
        start = number * self.size - shift
        return max(0, start), min(self.length, start + self.size)


class TextSource:
    """The windows of documents, by number. Tokens are stored in 4 bytes each."""

    def __init__(self, files: Sequence[Path], reader: RecordReader, progress: Progress | None = None) -> None:
        if reader.max_length is None:
            raise InputError(
                "text files are presented in windows of max_length tokens; give max_length.",
                field="max_length",
            )
        self._bos = reader.bos()
        if not self._bos:
            raise InputError("the tokenizer has no <bos> to put before a window of text; use another format.")
        tokens, self._starts = _read_documents(files, reader, progress)
        self._tokens = np.frombuffer(tokens, dtype=np.uint32) if tokens else np.empty(0, np.uint32)
        self._documents = [
            WindowLayout(length=stop - start, size=reader.max_length - 1)
            for start, stop in zip(self._starts, self._starts[1:], strict=False)
        ]
        self._ends = np.cumsum([windows.count for windows in self._documents], dtype=np.int64)
        if self._tokens.size:
            reader.check_tokens((int(self._tokens.max()),))

    @property
    def num_records(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int, *, epoch: int, seed: int) -> RecordReading:
        """Window `index`, as its document is divided in this epoch."""
        document = int(np.searchsorted(self._ends, index, side="right"))
        windows = self._documents[document]
        shift = windows.shifts[below(len(windows.shifts), seed, Purpose.SHIFT, epoch, document)]
        number = index - int(self._ends[document]) + windows.count
        start, stop = windows.window(number, shift)
        begin = self._starts[document]
        tokens = (*self._bos, *self._tokens[begin + start : begin + stop].tolist())
        text = Span(len(self._bos), len(tokens))
        return RecordReading(examples=(TrainingExample(tokens, (text,), clipped=stop < windows.length),))


def _read_documents(
    files: Sequence[Path], reader: RecordReader, progress: Progress | None
) -> tuple[array[int], list[int]]:
    """All tokens, and the index of each document's first token, followed by the end of the last one."""
    tokens = array("I")
    assert tokens.itemsize == 4
    starts = [0]
    total = sum(map(_size, files))
    done = 0
    for file in files:
        is_blank = True
        before = len(tokens)
        for chunk, num_bytes in _chunks(file):
            is_blank = is_blank and not chunk.strip()
            tokens.extend(reader.encode(chunk, str(file)))
            done += num_bytes
            if progress is not None:
                progress(done, total)
        if is_blank:  # such as an empty `__init__.py`: only an eos
            del tokens[before:]
            continue
        tokens.append(reader.eos())
        starts.append(len(tokens))
    return tokens, starts


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None


def _chunks(file: Path) -> Iterator[tuple[str, int]]:
    """The text of a file in chunks that end at line ends, with the bytes read for each."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest, num_lines = "", 0
    try:
        with file.open("rb") as stream:
            while True:
                block = stream.read(_READ_BYTES)
                text = decoder.decode(block, final=not block)
                num_lines += text.count("\n")
                rest += text
                if not block:
                    break
                cut = _chunk_end(rest)
                yield rest[:cut], len(block)
                rest = rest[cut:]
    except UnicodeDecodeError as error:
        line = num_lines + error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{file}:{line}: the text is not UTF-8; store the file in that encoding.") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None
    yield rest, 0


def _chunk_end(text: str) -> int:
    """The end of the next chunk: after the last suitable line end; 0 if there is none and `text` may grow."""
    end = len(text)
    while (end := text.rfind("\n", 0, end)) >= 0:
        if _BORDER.match(text, end):
            return end + 1
    return 0 if len(text) < MAX_CHUNK_CHARS else len(text)
