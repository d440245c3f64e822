"""Run a task: examples in batches, each with its own seed; results are written at once."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dgemma.errors import DgemmaError, InputError
from dgemma.evaluation.intervals import require_scipy
from dgemma.evaluation.report import EvaluationReport
from dgemma.evaluation.results import (
    AnswerStats,
    ExampleResult,
    ResultsFile,
    StoredRun,
    mark_of,
    seed_of,
    stored_run,
)
from dgemma.evaluation.task import CheckedTask, EvaluationPlan, PromptReader, Task
from dgemma.events import Answer

if TYPE_CHECKING:
    from dgemma.language_model import LanguageModel


# Errors of one example that do not end the run.
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
    progress: Callable[[ExampleResult], None] | None = None,
) -> EvaluationReport:
    """Run `task` and report. See `EvaluationPlan` for the options.

    out: a JSON Lines file of the results; a file with equal settings is continued.
    model: the name of the model in the report. progress: called with each result.
    """
    require_scipy()
    plan = EvaluationPlan(
        limit=limit, batch=batch, options=options or {}, seed=seed, raw=raw, system=system, thinking=thinking
    )
    evaluation = Evaluation(lm, task, plan, out=out, model=model)
    for result in evaluation.run():
        if progress is not None:
            progress(result)
    return evaluation.report()


@dataclass(frozen=True)
class _PendingExample:
    """An example whose prompt is tokenized."""

    number: int
    example: Any
    mark: str
    groups: tuple[str, ...]
    ids: tuple[int, ...]


class Evaluation:
    """One run of a task. `run` yields each result; `report` can be called at any time."""

    def __init__(
        self,
        lm: LanguageModel,
        task: Task[Any],
        plan: EvaluationPlan,
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
        execution = lm.transformer.execution
        self._settings: dict[str, Any] = {
            "task": self._task.name, "weights": fingerprint(lm),
            "dtype": str(lm.dtype).removeprefix("torch."), "device": lm.device.type,
            "exact": execution.exact, "compiled": execution.fused_vocabulary,
            "raw": raw, "system": plan.system, "thinking": plan.thinking, "options": self._options,
        }  # fmt: skip
        stored = None if out is None else stored_run(out)
        self._seed = _seed(plan.seed, stored)
        self._settings["seed"] = self._seed
        self._examples, self.total = self._task.examples()
        if plan.limit is not None:
            self.total = plan.limit if self.total is None else min(self.total, plan.limit)
        self._file = None if out is None else ResultsFile(out, stored, model=model, settings=self._settings)
        self.num_stored = 0 if stored is None else len(stored.results)
        self._results: dict[int, ExampleResult] = {}
        self._stopped: str | None = "it was not run to its end"

    def report(self) -> EvaluationReport:
        """The results so far."""
        results = tuple(result for _, result in sorted(self._results.items()))
        return EvaluationReport(
            task=self._task.name,
            model=self._model,
            settings=self._settings,
            results=results,
            stopped=self._stopped,
        )

    def run(self) -> Iterator[ExampleResult]:
        """Yield each result when it is computed. Results of the file are yielded without a new run."""
        try:
            yield from self._run()
        finally:
            if self._file is not None:
                self._file.close()

    def _run(self) -> Iterator[ExampleResult]:
        waiting: list[_PendingExample] = []
        ended: str | None = None
        numbered = enumerate(islice(self._examples, self._plan.limit))
        while True:
            try:
                number, example = next(numbered)
            except StopIteration:
                break
            except InputError as error:
                # An error of the task: the examples before it still run.
                ended = f"example {len(self._results) + len(waiting)}: {error}"
                break
            ready = self._prepare(number, example)
            if isinstance(ready, ExampleResult):
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

    def _prepare(self, number: int, example: Any) -> _PendingExample | ExampleResult:
        """The tokenized example; or its result, if it is stored already or its prompt failed."""
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
        return _PendingExample(number, example, mark, groups, ids)

    def _stored(self, number: int, mark: str) -> ExampleResult | None:
        run = self._file.stored if self._file is not None else None
        result = run.results.get(number) if run is not None else None
        # Failed examples run again: the cause may be fixed.
        if self._file is None or result is None or result.failure is not None:
            return None
        if result.mark != mark:
            raise InputError(
                f"example {number} is another one than in {self._file.path}; the task has changed. Choose "
                "another file, or remove it."
            )
        return result

    def _answer(self, batch: Sequence[_PendingExample]) -> Iterator[ExampleResult]:
        for pending, answer, seconds in self._generate(batch):
            if isinstance(answer, BaseException):
                failure = " ".join(str(answer).split()) or type(answer).__name__
                yield self._keep(self._result(pending.number, pending.mark, pending.groups, failure=failure))
                continue
            written = AnswerStats.of(answer, seconds)
            try:
                scores = self._task.score(pending.example, answer)
            except InputError as error:
                result = self._result(
                    pending.number, pending.mark, pending.groups, failure=str(error), written=written
                )
            else:
                result = self._result(
                    pending.number, pending.mark, pending.groups, scores=scores, written=written
                )
            yield self._keep(result)

    def _generate(
        self, pending: Sequence[_PendingExample]
    ) -> list[tuple[_PendingExample, Answer | BaseException, float]]:
        """Answers of one batch. If it fails as a whole, each example is tried alone."""
        if not pending:
            return []
        seeds = [seed_of(self._seed, example.number) for example in pending]
        begin = time.perf_counter()
        try:
            answers = self._lm.generate([example.ids for example in pending], seeds=seeds, **self._options)
        except _FAILURES as error:
            if len(pending) == 1:
                return [(pending[0], error, 0.0)]
            return [found for example in pending for found in self._generate([example])]
        # A batch ends with its slowest row, so its time is divided evenly.
        seconds = (time.perf_counter() - begin) / len(pending)
        return [(example, answer, seconds) for example, answer in zip(pending, answers, strict=True)]

    def _result(self, number: int, mark: str, groups: tuple[str, ...], **found: Any) -> ExampleResult:
        return ExampleResult(
            number=number, mark=mark, seed=seed_of(self._seed, number), groups=groups, **found
        )

    def _keep(self, result: ExampleResult) -> ExampleResult:
        run = self._file.stored if self._file is not None else None
        if self._file is not None and (run is None or run.results.get(result.number) != result):
            self._file.add(result)
        self._results[result.number] = result
        return result


def _seed(seed: int | None, stored: StoredRun | None) -> int:
    """`seed`; if it is None, the seed of the file to continue; else a random one."""
    if seed is not None:
        return seed
    earlier = None if stored is None else stored.settings.get("seed")
    return earlier if isinstance(earlier, int) else secrets.randbits(32)


# Values hashed per tensor: training changes all of them, so a few suffice.
_SAMPLES = 64


def fingerprint(lm: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(lm.transformer.state_dict().items()):
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.cpu().double().numpy().tobytes())
    for name, module in lm.transformer.named_modules():
        if hasattr(module, "alpha"):  # of an adapter: it scales the tensors' product
            digest.update(f"{name} {module.alpha}".encode())
    return digest.hexdigest()[:16]
