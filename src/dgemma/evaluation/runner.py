"""Running a task: examples in batches, each with its own seed, results kept as they come."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dgemma.errors import DgemmaError, InputError
from dgemma.evaluation.fingerprint import fingerprint
from dgemma.evaluation.plan import Plan
from dgemma.evaluation.prompt_reader import PromptReader
from dgemma.evaluation.report import Report
from dgemma.evaluation.result import Result, Written, mark_of, seed_of
from dgemma.evaluation.results_file import ResultsFile, StoredRun, stored_run
from dgemma.evaluation.task import CheckedTask, Task
from dgemma.events import Answer

if TYPE_CHECKING:
    from dgemma.language_model import LanguageModel

# What one example may die of without ending the run.
_FAILURES = (DgemmaError, MemoryError, torch.OutOfMemoryError)


def evaluate(
    lm: LanguageModel,
    task: Task[Any],
    *,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
    batch: int = 1,
    seed: int | None = None,
    raw: bool = False,
    system: str | None = None,
    thinking: bool = False,
    out: str | Path | None = None,
    model: str = "",
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Run `task` and report. See `Plan` for the options.

    out: a file of JSON lines that grows with the run; one of equal settings is gone on with.
    model: what the report shall call the model. progress: called with each result.
    """
    plan = Plan(
        limit=limit, batch=batch, options=options or {}, seed=seed, raw=raw, system=system, thinking=thinking
    )
    evaluation = Evaluation(lm, task, plan, out=out, model=model)
    for result in evaluation.run():
        if progress is not None:
            progress(result)
    return evaluation.report()


@dataclass(frozen=True)
class _Asked:
    """An example that is ready for the model."""

    number: int
    example: Any
    mark: str
    groups: tuple[str, ...]
    ids: tuple[int, ...]


class Evaluation:
    """One run of a task, to be watched, and to be reported on at any time."""

    def __init__(
        self,
        lm: LanguageModel,
        task: Task[Any],
        plan: Plan,
        *,
        out: str | Path | None = None,
        model: str = "",
    ) -> None:
        self._lm, self._plan, self._model = lm, plan, model
        self._task = CheckedTask(task)
        raw = plan.raw or self._task.raw
        self._reader = PromptReader(lm=lm, raw=raw, system=plan.system, thinking=plan.thinking)
        params = plan.params(lm.generation_defaults, self._task.options(), task_name=self._task.name)
        self._options = {name: value for name, value in asdict(params).items() if name != "seed"}
        execution = lm.stack.execution
        self._settings: dict[str, Any] = {
            "task": self._task.name, "weights": fingerprint(lm),
            "dtype": str(lm.dtype).removeprefix("torch."), "device": lm.device.type,
            "exact": execution.exact, "compiled": execution.fused_vocabulary,
            "raw": raw, "system": plan.system, "thinking": plan.thinking, "options": self._options,
        }  # fmt: skip
        held = None if out is None else stored_run(out)
        self._seed = _seed(plan.seed, held)
        self._settings["seed"] = self._seed
        self._examples, self.total = self._task.examples()
        if plan.limit is not None:
            self.total = plan.limit if self.total is None else min(self.total, plan.limit)
        self._file = None if out is None else ResultsFile(out, held, model=model, settings=self._settings)
        self.num_held = 0 if held is None else len(held.results)
        self._results: dict[int, Result] = {}
        self._stopped: str | None = "it was not run to its end"

    def report(self) -> Report:
        """The results so far."""
        results = tuple(result for _, result in sorted(self._results.items()))
        return Report(
            task=self._task.name,
            model=self._model,
            settings=self._settings,
            results=results,
            stopped=self._stopped,
        )

    def run(self) -> Iterator[Result]:
        """Each result when it is there: those of the file first, as their examples come by."""
        try:
            yield from self._run()
        finally:
            if self._file is not None:
                self._file.close()

    def _run(self) -> Iterator[Result]:
        waiting: list[_Asked] = []
        ended: str | None = None
        numbered = enumerate(islice(self._examples, self._plan.limit))
        while True:
            try:
                number, example = next(numbered)
            except StopIteration:
                break
            except InputError as error:
                # The task's own error: what was asked before it is still answered.
                ended = f"example {len(self._results) + len(waiting)}: {error}"
                break
            ready = self._prepare(number, example)
            if isinstance(ready, Result):
                yield self._keep(ready)
                continue
            waiting.append(ready)
            if len(waiting) == self._plan.batch:
                yield from self._answer(waiting)
                waiting = []
        yield from self._answer(waiting)
        if not self._results:
            raise InputError(ended or f"task {self._task.name!r} has no examples; there is nothing to run.")
        self._stopped = ended

    def _prepare(self, number: int, example: Any) -> _Asked | Result:
        """An example to be asked; or its result, if it has one already, or cannot be asked."""
        groups: tuple[str, ...] = ()
        prompt = None
        failure = ""
        ids: tuple[int, ...] = ()
        try:
            groups = self._task.groups(example)
            prompt = self._task.prompt(example)
            ids = self._reader.ids(prompt)
        except DgemmaError as error:
            failure = str(error)
        mark = mark_of(example, prompt)
        stored = self._stored(number, mark)
        if stored is not None:
            return stored
        if failure:
            return self._result(number, mark, groups, failure=failure)
        return _Asked(number, example, mark, groups, ids)

    def _stored(self, number: int, mark: str) -> Result | None:
        held = self._file.stored if self._file is not None else None
        result = held.results.get(number) if held is not None else None
        # What failed is tried again: its cause may have been mended.
        if self._file is None or result is None or result.failure is not None:
            return None
        if result.mark != mark:
            raise InputError(
                f"example {number} is another one than in {self._file.path}; the task has changed. Choose "
                "another file, or remove it."
            )
        return result

    def _answer(self, asked: Sequence[_Asked]) -> Iterator[Result]:
        for one, answer, seconds in self._generate(asked):
            if isinstance(answer, BaseException):
                failure = " ".join(str(answer).split()) or type(answer).__name__
                yield self._keep(self._result(one.number, one.mark, one.groups, failure=failure))
                continue
            written = Written.of(answer, seconds)
            try:
                scores = self._task.score(one.example, answer)
            except InputError as error:
                result = self._result(one.number, one.mark, one.groups, failure=str(error), written=written)
            else:
                result = self._result(one.number, one.mark, one.groups, scores=scores, written=written)
            yield self._keep(result)

    def _generate(self, asked: Sequence[_Asked]) -> list[tuple[_Asked, Answer | BaseException, float]]:
        """Answers of one batch. If it fails as a whole, each example is tried alone."""
        if not asked:
            return []
        seeds = [seed_of(self._seed, one.number) for one in asked]
        begin = time.perf_counter()
        try:
            answers = self._lm.generate([one.ids for one in asked], seeds=seeds, **self._options)
        except _FAILURES as error:
            if len(asked) == 1:
                return [(asked[0], error, 0.0)]
            return [found for one in asked for found in self._generate([one])]
        # All rows wait for the slowest: their time is shared.
        seconds = (time.perf_counter() - begin) / len(asked)
        return [(one, answer, seconds) for one, answer in zip(asked, answers, strict=True)]

    def _result(self, number: int, mark: str, groups: tuple[str, ...], **found: Any) -> Result:
        return Result(number=number, mark=mark, seed=seed_of(self._seed, number), groups=groups, **found)

    def _keep(self, result: Result) -> Result:
        held = self._file.stored if self._file is not None else None
        if self._file is not None and (held is None or held.results.get(result.number) != result):
            self._file.add(result)
        self._results[result.number] = result
        return result


def _seed(seed: int | None, held: StoredRun | None) -> int:
    """As given; else the one of the file to go on with; else a fresh one."""
    if seed is not None:
        return seed
    stored = None if held is None else held.settings.get("seed")
    return stored if isinstance(stored, int) else secrets.randbits(32)
