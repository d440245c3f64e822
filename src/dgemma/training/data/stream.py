"""The examples of a run, by presentation number: a function of the data, the seed and the number. No torch.

`ExampleStream.check_all` reads a whole data set before a run and reports its counts and errors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, count

from dgemma.errors import InputError
from dgemma.training.data.order import DataOrder, Purpose, below, check_seed, shuffled
from dgemma.training.data.records import Progress, RecordReading, SkipReason, TrainingExample
from dgemma.training.data.sources import RecordSource, StreamSource

MAX_PROBLEMS = 20
_RECORDS_PER_REPORT = 64


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """The counts of one epoch.

    canvases: the number of responses that need 1, 2, 3 ... canvases.
    skipped: the number of skipped examples, by reason.
    problems: the first errors, each with its location; `num_broken` records have one.
    """

    num_records: int
    num_examples: int
    num_tokens: int
    num_response_tokens: int
    longest: int
    num_clipped: int
    num_broken: int
    skipped: Mapping[SkipReason, int]
    canvases: Mapping[int, int]
    problems: tuple[str, ...]


@dataclass
class DataCounter:
    """Sums the counts of readings."""

    canvas_len: int
    num_records: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_response_tokens: int = 0
    longest: int = 0
    num_clipped: int = 0
    num_broken: int = 0
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    canvases: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, reading: RecordReading) -> None:
        self.num_records += 1
        self.skipped.update(reading.skipped)
        for example in reading.examples:
            self.num_examples += 1
            self.num_tokens += len(example.tokens)
            self.longest = max(self.longest, len(example.tokens))
            self.num_clipped += example.clipped
            for span in example.responses:
                self.num_response_tokens += span.stop - span.start
                self.canvases[-(-(span.stop - span.start) // self.canvas_len)] += 1

    def add_problem(self, problem: str) -> None:
        self.num_records += 1
        self.num_broken += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def report(self) -> DataReport:
        return DataReport(
            num_records=self.num_records,
            num_examples=self.num_examples,
            num_tokens=self.num_tokens,
            num_response_tokens=self.num_response_tokens,
            longest=self.longest,
            num_clipped=self.num_clipped,
            num_broken=self.num_broken,
            skipped=dict(self.skipped),
            canvases=dict(sorted(self.canvases.items())),
            problems=tuple(self.problems),
        )


class ExampleStream:
    """Presentation p of a run, for any p.

    If the record of a presentation has no example (its prompt is too long), another record replaces it, which
    depends on p alone. If a record has several examples, one is drawn, with a probability proportional to its
    response tokens.

    `DataOrder` orders sources with random access; any presentation is found at once. Streams are shuffled in
    a buffer of `buffer_len` records. Their presentations count only records that have an example, and an
    earlier presentation is found by reading from the beginning again.
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
            raise InputError.about(
                "buffer_len", f"is {buffer_len}; a shuffle buffer holds at least one record."
            )
        self._seed = seed
        # The skipped examples of each record read so far.
        self._skipped: dict[int, tuple[SkipReason, ...]] = {}
        self._source = source
        self._presenter: _RandomAccess | _Sequential
        if isinstance(source, StreamSource):
            self._presenter = _Sequential(source, seed, buffer_len if shuffle else 1, self._skipped)
        else:
            order = DataOrder(num_records=source.num_records, seed=seed, shuffle=shuffle)
            self._presenter = _RandomAccess(source, order, self._skipped)

    @property
    def num_records(self) -> int | None:
        """Presentations of an epoch; None for a stream, whose length is not known."""
        return None if isinstance(self._source, StreamSource) else self._source.num_records

    @property
    def skipped(self) -> dict[SkipReason, int]:
        """The number of skipped examples of the records read so far, by reason."""
        return dict(Counter(reason for reasons in self._skipped.values() for reason in reasons))

    def take(self, start: int, count: int) -> list[TrainingExample]:
        """The examples of presentations start, start + 1, ... start + count - 1."""
        if start < 0 or count < 0:
            raise InputError(f"take({start}, {count}): presentations and their number are counted from 0.")
        readings = self._presenter.take(start, count)
        return [self._choose(reading, start + offset) for offset, reading in enumerate(readings)]

    def check_all(self, *, canvas_len: int, progress: Progress | None = None) -> DataReport:
        """Read every record once, as in the first epoch, and count. Errors are collected, not raised.

        progress: called with numbers of records.
        """
        if canvas_len < 1:
            raise InputError.about("canvas_len", f"is {canvas_len}; a canvas needs at least one token.")
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

    def _choose(self, reading: RecordReading, presentation: int) -> TrainingExample:
        sizes = [sum(span.stop - span.start for span in each.responses) for each in reading.examples]
        draw = below(sum(sizes), self._seed, Purpose.CHOICE, presentation)
        return reading.examples[bisect_right(list(accumulate(sizes)), draw)]


class _RandomAccess:
    def __init__(
        self, source: RecordSource, order: DataOrder, skipped: dict[int, tuple[SkipReason, ...]]
    ) -> None:
        self._source = source
        self._order = order
        self._skipped = skipped

    def take(self, start: int, count: int) -> Iterator[RecordReading]:
        return (self._presented(presentation) for presentation in range(start, start + count))

    def each_once(self) -> Iterator[RecordReading | InputError]:
        for index in range(self._source.num_records):
            try:
                yield self._read(index, epoch=0)
            except InputError as error:
                yield error

    def _presented(self, presentation: int) -> RecordReading:
        epoch, index = self._order.place(presentation)
        reading = self._read(index, epoch)
        if reading.examples:
            return reading
        for other in self._order.replacements(presentation):
            reading = self._read(other, epoch)
            if reading.examples:
                return reading
        raise _no_examples(f"none of the {self._source.num_records} records")

    def _read(self, index: int, epoch: int) -> RecordReading:
        reading = self._source.read(index, epoch=epoch, seed=self._order.seed)
        if reading.skipped:
            self._skipped[index] = reading.skipped
        return reading


class _Sequential:
    def __init__(
        self, source: StreamSource, seed: int, buffer_len: int, skipped: dict[int, tuple[SkipReason, ...]]
    ) -> None:
        self._source = source
        self._seed = seed
        self._buffer_len = buffer_len
        self._skipped = skipped
        self._failure: Exception | None = None
        self._rewind()

    def take(self, start: int, count: int) -> Iterator[RecordReading]:
        if self._failure is not None and not self._source.is_repeatable:
            raise self._failure
        if self._failure is not None:
            self._rewind()
        if start < self._next:
            if not self._source.is_repeatable:
                raise InputError(
                    f"presentation {start} was read already, up to {self._next}, and data is an iterator, "
                    "which comes once; give an iterable that can be read again, such as a list.",
                    field="data",
                )
            self._rewind()
        for _ in range(start - self._next):
            self._advance()
        return (self._advance() for _ in range(count))

    def each_once(self) -> Iterator[RecordReading | InputError]:
        if not self._source.is_repeatable:
            raise InputError(
                "data is an iterator, which comes once: checking would leave nothing to train on. Give an "
                "iterable that can be read again, such as a list.",
                field="data",
            )
        return self._source.readings()

    def _rewind(self) -> None:
        self._failure = None
        self._next = 0
        self._readings = self._all()

    def _advance(self) -> RecordReading:
        try:
            reading = next(self._readings)
        except Exception as error:  # an InputError, or any error of the iterable
            self._failure = error
            raise
        self._next += 1
        return reading

    def _all(self) -> Iterator[RecordReading]:
        """The readings that have examples, of all epochs, without end."""
        for epoch in count():
            num_shown = 0
            readings = self._without_empty()
            for reading in shuffled(readings, buffer_len=self._buffer_len, seed=self._seed, epoch=epoch):
                num_shown += 1
                yield reading
            if not num_shown and self._source.is_repeatable:
                raise _no_examples("no record of the stream")
            if not self._source.is_repeatable:
                raise InputError(
                    f"data ended after {self._next} presentations, and it is an iterator, which comes once; "
                    "give an iterable that can be read again, such as a list.",
                    field="data",
                )

    def _without_empty(self) -> Iterator[RecordReading]:
        for number, reading in enumerate(self._source.readings()):
            if isinstance(reading, InputError):
                raise reading
            if reading.skipped:
                self._skipped[number] = reading.skipped
            if reading.examples:
                yield reading


def _no_examples(which: str) -> InputError:
    return InputError(
        f"{which} gives an example: {SkipReason.PROMPT_TOO_LONG.value} in each. Raise max_length.",
        field="max_length",
    )
