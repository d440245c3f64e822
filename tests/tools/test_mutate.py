"""The mutation tool makes mistakes where tests must notice them, one at a time, and counts them right."""

from __future__ import annotations

import ast

from tools.mutate import mutants_of, mutated, summary

SOURCE = '''
"""Adds 1 to 2."""
LIMIT = 3

class Queue:
    size: tuple[int, 4] = 5

    def __repr__(self) -> str:
        return "a" * 6

    def push(self, item: int) -> None:
        assert item < 7
        if item < self.size and not self.is_full:
            self.items.append(item)
            _LOG.info("now 8")
            self.last = item + 1
        elif item is None:
            raise ValueError(f"{item + 9} is wrong")

    def some(self):
        return max(self.items[1:])
'''


def test_mistakes_are_made_in_what_runs_and_nowhere_else() -> None:
    found = {f"{mutant.before} -> {mutant.after}" for mutant in mutants_of("queue.py", SOURCE)}
    assert found == {
        "3 -> 4",
        "3 -> 2",
        "5 -> 6",
        "5 -> 4",
        "item < self.size and (not self.is_full) -> item < self.size or not self.is_full",
        "item < self.size -> item <= self.size",
        "not self.is_full -> self.is_full",
        "self.items.append(item) -> pass",
        "self.last = item + 1 -> pass",
        "item + 1 -> item - 1",
        "1 -> 2",
        "1 -> 0",
        "item is None -> item is not None",
        "raise ValueError(f'{item + 9} is wrong') -> pass",
        "max(self.items[1:]) -> min(self.items[1:])",
        "1: -> :",
    }


def test_a_mutant_differs_from_its_source_in_one_place() -> None:
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in mutants_of("queue.py", SOURCE):
        other = mutated(mutant, SOURCE).splitlines()
        assert len(other) == len(plain)
        assert sum(a != b for a, b in zip(plain, other, strict=True)) == 1, mutant.key


def test_a_mutant_knows_the_lines_that_a_test_must_run() -> None:
    lines = {mutant.before: mutant.lines for mutant in mutants_of("queue.py", SOURCE)}
    assert lines["3"] == lines["5"] == (), "they run at import"
    assert lines["item < self.size"] == (13,), "not the lines of the branches"
    assert lines["item + 1"] == (16,)


def test_equivalent_mutants_are_not_counted() -> None:
    def result(before: str, killer: str | None) -> dict[str, object]:
        return {
            "file": "a.py", "line": 1, "place": "f: y = 1", "before": before, "after": "x",
            "killed_by": killer, "seconds": 2.0,
        }  # fmt: skip

    results = [result("a", "test"), result("b", "hangs"), result("c", None), result("d", None)]
    found = summary(results, {"a.py f: y = 1: d -> x": "the same"})
    assert (found["mutants"], found["killed"], found["hung"], found["equivalent"]) == (4, 2, 1, 1)
    assert found["kill_rate"] == 0.6667
    assert found["survivors"] == ["a.py:1 c -> x"]
    assert found["equivalent_mutants"] == {"a.py:1 d -> x": "the same"}
