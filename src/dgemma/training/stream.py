"""The examples of a run, by presentation number: the same for the same data and seed, wherever one starts."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, count

from dgemma.errors import InputError
from dgemma.training.data_progress import Progress
from dgemma.training.data_report import DataCounter, DataReport
from dgemma.training.example import Example
from dgemma.training.order import Order, Use, below, check_seed, shuffled
from dgemma.training.records import Reading, Skipped
from dgemma.training.sources import RecordSource, StreamSource

_RECORDS_PER_REPORT = 64


class ExampleStream:
    """Presentation p of a run, for any p.

    A presentation whose record gives no example (its prompt is too long) shows another record, found by a
    rule that depends on p alone. Of a record that gives several, one is shown, the likelier the more there is
    to learn from it.

    Sources that give records by number are ordered by `Order`; any presentation is found at once. Streams are
    shuffled in a buffer of `buffer_len` records, their presentations count only records that give an example,
    and to go back is to read from the beginning again.
    """

    def __init__(
        self,
        source: RecordSource | StreamSource,
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer_len: int = 1024,
    ) -> None:
        check_seed(seed)
        if buffer_len < 1:
            raise InputError(f"buffer_len is {buffer_len}; a shuffle buffer holds at least one record.")
        self._seed = seed
        # What was left out of each record met so far.
        self._skipped: dict[int, tuple[Skipped, ...]] = {}
        self._source = source
        self._presenter: _ByNumber | _InTurn
        if isinstance(source, StreamSource):
            self._presenter = _InTurn(source, seed, buffer_len if shuffle else 1, self._skipped)
        else:
            order = Order(num_records=source.num_records, seed=seed, shuffle=shuffle)
            self._presenter = _ByNumber(source, order, self._skipped)

    @property
    def num_records(self) -> int | None:
        """Presentations of an epoch; None for a stream, whose end nobody knows."""
        return None if isinstance(self._source, StreamSource) else self._source.num_records

    @property
    def skipped(self) -> dict[Skipped, int]:
        """How many examples of the records met so far are left out, by reason."""
        return dict(Counter(reason for reasons in self._skipped.values() for reason in reasons))

    def take(self, start: int, count: int) -> list[Example]:
        """The examples of presentations start, start + 1, ... start + count - 1."""
        if start < 0 or count < 0:
            raise InputError(f"take({start}, {count}): presentations and their number are counted from 0.")
        readings = self._presenter.take(start, count)
        return [self._choose(reading, start + offset) for offset, reading in enumerate(readings)]

    def check_all(self, *, canvas_len: int, progress: Progress | None = None) -> DataReport:
        """Read every record once, as the first epoch shows it, and count. Faults are collected, not raised.

        progress: called with records.
        """
        if canvas_len < 1:
            raise InputError(f"canvas_len is {canvas_len}; a canvas needs at least one token.")
        counter = DataCounter(canvas_len)
        for number, reading in enumerate(self._presenter.each_once(), start=1):
            if isinstance(reading, InputError):
                counter.add_problem(str(reading))
            else:
                counter.add(reading)
            if progress is not None and number % _RECORDS_PER_REPORT == 0:
                progress(number, self.num_records)
        if progress is not None:
            progress(counter.num_records, counter.num_records)
        return counter.report()

    def _choose(self, reading: Reading, presentation: int) -> Example:
        sizes = [sum(span.stop - span.start for span in each.responses) for each in reading.examples]
        draw = below(sum(sizes), self._seed, Use.CHOICE, presentation)
        return reading.examples[bisect_right(list(accumulate(sizes)), draw)]


class _ByNumber:
    def __init__(self, source: RecordSource, order: Order, skipped: dict[int, tuple[Skipped, ...]]) -> None:
        self._source = source
        self._order = order
        self._skipped = skipped

    def take(self, start: int, count: int) -> Iterator[Reading]:
        return (self._presented(presentation) for presentation in range(start, start + count))

    def each_once(self) -> Iterator[Reading | InputError]:
        for index in range(self._source.num_records):
            try:
                yield self._read(index, epoch=0)
            except InputError as error:
                yield error

    def _presented(self, presentation: int) -> Reading:
        epoch, index = self._order.place(presentation)
        reading = self._read(index, epoch)
        if reading.examples:
            return reading
        for other in self._order.replacements(presentation):
            reading = self._read(other, epoch)
            if reading.examples:
                return reading
        raise InputError(_nothing_to_learn(f"none of the {self._source.num_records} records"))

    def _read(self, index: int, epoch: int) -> Reading:
        reading = self._source.read(index, epoch=epoch, seed=self._order.seed)
        if reading.skipped:
            self._skipped[index] = reading.skipped
        return reading


class _InTurn:
    def __init__(
        self, source: StreamSource, seed: int, buffer_len: int, skipped: dict[int, tuple[Skipped, ...]]
    ) -> None:
        self._source = source
        self._seed = seed
        self._buffer_len = buffer_len
        self._skipped = skipped
        self._failure: Exception | None = None
        self._rewind()

    def take(self, start: int, count: int) -> Iterator[Reading]:
        if self._failure is not None and not self._source.is_repeatable:
            raise self._failure
        if self._failure is not None:
            self._rewind()
        if start < self._next:
            if not self._source.is_repeatable:
                raise InputError(
                    f"presentation {start} was read already, up to {self._next}, and data is an iterator, "
                    "which comes once; give an iterable that can be read again, such as a list."
                )
            self._rewind()
        for _ in range(start - self._next):
            self._advance()
        return (self._advance() for _ in range(count))

    def each_once(self) -> Iterator[Reading | InputError]:
        if not self._source.is_repeatable:
            raise InputError(
                "data is an iterator, which comes once: checking would leave nothing to train on. Give an "
                "iterable that can be read again, such as a list."
            )
        return self._source.readings()

    def _rewind(self) -> None:
        self._failure = None
        self._next = 0
        self._readings = self._all()

    def _advance(self) -> Reading:
        try:
            reading = next(self._readings)
        except Exception as error:  # ours, or the iterable's own
            self._failure = error
            raise
        self._next += 1
        return reading

    def _all(self) -> Iterator[Reading]:
        """Every epoch's readings that show something, without end."""
        for epoch in count():
            num_shown = 0
            whole = self._without_empty()
            for reading in shuffled(whole, buffer_len=self._buffer_len, seed=self._seed, epoch=epoch):
                num_shown += 1
                yield reading
            if not num_shown and self._source.is_repeatable:
                raise InputError(_nothing_to_learn("no record of the stream"))
            if not self._source.is_repeatable:
                raise InputError(
                    f"data ended after {self._next} presentations, and it is an iterator, which comes once; "
                    "give an iterable that can be read again, such as a list."
                )

    def _without_empty(self) -> Iterator[Reading]:
        for number, reading in enumerate(self._source.readings()):
            if isinstance(reading, InputError):
                raise reading
            if reading.skipped:
                self._skipped[number] = reading.skipped
            if reading.examples:
                yield reading


def _nothing_to_learn(which: str) -> str:
    return f"{which} gives an example: {Skipped.PROMPT_TOO_LONG.value} in each. Raise max_length."
