"""Two runs on the same examples: by how much the second differs, and how sure that is. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from dgemma.errors import InputError
from dgemma.evaluation.intervals import Difference, paired_difference
from dgemma.evaluation.report import score_names, score_value
from dgemma.evaluation.result import Result


def compare(first: Iterable[Result], second: Iterable[Result]) -> dict[str, Difference]:
    """Second minus first on the examples that both have: each score, and `steps`, the mean per canvas."""
    pairs = _pairs(first, second)
    differences: dict[str, Difference] = {}
    for name in score_names([result for pair in pairs for result in pair]):
        values = [(score_value(a, name), score_value(b, name)) for a, b in pairs]
        both = [(a, b) for a, b in values if a is not None and b is not None]
        if both:
            differences[name] = paired_difference([a for a, _ in both], [b for _, b in both])
    steps = [(a.written.steps, b.written.steps) for a, b in pairs if a.written and b.written]
    means = [(sum(a) / len(a), sum(b) / len(b)) for a, b in steps if a and b]
    if means:
        differences["steps"] = paired_difference([a for a, _ in means], [b for _, b in means])
    return differences


def _pairs(first: Iterable[Result], second: Iterable[Result]) -> list[tuple[Result, Result]]:
    known = {result.number: result for result in first}
    pairs = [(known[result.number], result) for result in second if result.number in known]
    if not pairs:
        raise InputError("the two runs have no example in common; run the same task in both.")
    for a, b in pairs:
        if a.mark != b.mark:
            raise InputError(
                f"example {a.number} is another one in the other run; only runs of the same task can be "
                "compared."
            )
    return pairs
