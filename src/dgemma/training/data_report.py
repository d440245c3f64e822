"""What a whole data set holds: counted, and checked, before a run begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from dgemma.training.records import Reading, Skipped

MAX_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """The counts of one epoch.

    canvases: how many responses take 1, 2, 3 ... canvases.
    skipped: examples that are not there, by reason.
    problems: the first faults found, each with its place; `num_broken` records have one.
    """

    num_records: int
    num_examples: int
    num_tokens: int
    num_response_tokens: int
    longest: int
    num_clipped: int
    num_broken: int
    skipped: Mapping[Skipped, int]
    canvases: Mapping[int, int]
    problems: tuple[str, ...]


@dataclass
class DataCounter:
    """Adds up readings."""

    canvas_len: int
    num_records: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_response_tokens: int = 0
    longest: int = 0
    num_clipped: int = 0
    num_broken: int = 0
    skipped: Counter[Skipped] = field(default_factory=Counter)
    canvases: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, reading: Reading) -> None:
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
