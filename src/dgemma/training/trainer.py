"""The training loop: from presentation numbers to weights, resumable to the bit.

Nothing random is kept between steps: data order and noise are functions of (seed, presentation), and
presentation numbers of the step. A state is therefore the weights, the optimizer's moments and a step number.
"""

from __future__ import annotations

import enum
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.utils.deterministic

from dgemma.errors import InputError, TrainingError
from dgemma.language_model import LanguageModel
from dgemma.training.canvases import Batch, make_batch
from dgemma.training.curves import write_curves
from dgemma.training.data_progress import Progress
from dgemma.training.event_file import EventFile
from dgemma.training.held_out import LossSums, look_at_held_out
from dgemma.training.objective import token_losses
from dgemma.training.optimizer import Optimizer
from dgemma.training.recipe import Recipe
from dgemma.training.recipe_file import to_plain, with_new_entries
from dgemma.training.report import HeldOutReport, Report, RunLog, StepReport
from dgemma.training.run_directory import RunDirectory, differences
from dgemma.training.schedule import learning_rate
from dgemma.training.setup import prepare
from dgemma.training.weights import TrainedWeights

MAX_BAD_STEPS = 10
# What may change between the parts of a run without changing its result.
_FREE = ("out", "saving", "held_out", "tensorboard")


class Outcome(enum.Enum):
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


class Listener(Protocol):
    """Whom a run tells how it goes."""

    def step(self, report: StepReport) -> None: ...
    def held_out(self, report: HeldOutReport) -> None: ...
    def saved(self, step: int) -> None: ...
    def note(self, text: str) -> None: ...


class Trainer:
    """One run, begun or gone on with: `Trainer(recipe).run(listener)`."""

    def __init__(
        self, recipe: Recipe, *, lm: LanguageModel | None = None, progress: Progress | None = None
    ) -> None:
        self.recipe = recipe
        self.directory = RunDirectory(recipe.out)
        self._plain = to_plain(recipe)
        states = self.directory.states()
        facts, tensors = self.directory.load_state(states[-1]) if states else ({}, {})
        self._refuse_changed(facts)
        self.setup = prepare(recipe, lm=lm, progress=progress)
        self._weights = TrainedWeights(self.setup.trained)
        self._optimizer = Optimizer(self._weights, recipe.optimizer)
        self.notes: list[str] = []
        if states:
            self._check_surroundings(facts)
            self._optimizer.restore(tensors)
        self.start_step = self._step = int(facts.get("step", 0))
        self._tokens = int(facts.get("tokens", 0))
        self._num_bad = int(facts.get("num_bad", 0))
        self._speed = _Speed()

    @property
    def lm(self) -> LanguageModel:
        return self.setup.lm

    @property
    def num_trained(self) -> int:
        return self._weights.num_parameters

    def run(self, listener: Listener, should_stop: Callable[[], bool] = lambda: False) -> Outcome:
        """Train to the last step, or until `should_stop`: then the state is kept, and a new run goes on."""
        saving, looking = self.recipe.saving, self.recipe.held_out
        with ExitStack() as opened:
            opened.enter_context(self.directory.locked())
            opened.enter_context(deterministic())
            self.directory.write_recipe(self._plain)
            log = opened.enter_context(RunLog(self.directory.path, start_step=self._step))
            events = opened.enter_context(_events(self.recipe, self.directory, self._step))
            say = _Sayer(listener, log, events)
            for text in self.notes:
                listener.note(text)
            if looking is not None and self._step == 0:
                say(self._look())
            while self._step < self.recipe.steps:
                report = self._do_step()
                if not math.isfinite(report.grad_norm):
                    listener.note(f"step {self._step}: gradients are not finite; nothing was changed")
                say(report)
                last = self._step == self.recipe.steps
                if looking is not None and (last or self._step % looking.every == 0):
                    say(self._look())
                stopping = should_stop()
                if stopping or last or self._step % saving.every == 0:
                    self._save()
                    listener.saved(self._step)
                if stopping and not last:
                    write_curves(self.directory.path)
                    return Outcome.INTERRUPTED
            self._write_result()
            write_curves(self.directory.path)
        return Outcome.FINISHED

    def _do_step(self) -> StepReport:
        started = time.monotonic()
        recipe = self.recipe
        examples, batches = self._batches()
        num_diffusion = sum(float(batch.weights.sum()) for batch in batches)
        num_encoder = sum(float(batch.encoder_weights.sum()) for batch in batches)
        sums = LossSums()
        for batch in batches:
            batch = batch.to(self.lm.device)
            losses = token_losses(self.lm.stack, batch)
            # Means over the whole step's tokens, so that its division into forwards changes nothing.
            loss = (losses.diffusion * batch.weights).sum() / num_diffusion
            if recipe.noise.encoder_weight:
                encoder = (losses.encoder * batch.encoder_weights).sum() / num_encoder
                loss = loss + recipe.noise.encoder_weight * encoder
            loss.backward()
            self._weights.collect_gradients()
            sums.add(losses, batch)
        rate = learning_rate(self._step, recipe.steps, recipe.optimizer)
        norm = self._optimizer.step(rate)
        self._step += 1
        self._count_bad(norm)
        num_tokens = self._num_read(examples, batches) + sum(batch.clean.numel() for batch in batches)
        self._tokens += num_tokens
        seconds = time.monotonic() - started
        speed = self._speed.add(num_tokens, seconds)
        diffusion, encoder_loss = sums.means
        return StepReport(
            step=self._step,
            num_steps=recipe.steps,
            loss=diffusion + recipe.noise.encoder_weight * encoder_loss,
            diffusion=diffusion,
            encoder=encoder_loss,
            diffusion_by_noise=sums.noise_means,
            examples=self._step * recipe.batch,
            seconds=seconds,
            learning_rate=rate,
            grad_norm=norm,
            tokens=self._tokens,
            tokens_per_second=speed,
            eta_s=self._speed.seconds_per_step * (recipe.steps - self._step),
        )

    def _num_read(self, examples: list[Any], batches: list[Batch]) -> int:
        """Tokens the encoder reads, padding not counted."""
        if self.setup.canvases.encode_answers:
            return sum(len(example.tokens) for example in examples)
        each = self.setup.canvases.per_example
        return sum(int(batch.starts.view(-1, each).amax(1).sum()) for batch in batches)

    def _batches(self) -> tuple[list[Any], list[Batch]]:
        recipe = self.recipe
        first = self._step * recipe.batch
        examples = self.setup.stream.take(first, recipe.batch)
        size = recipe.micro_batch or recipe.batch
        return examples, [
            make_batch(examples[at : at + size], range(first + at, first + at + size), self.setup.canvases)
            for at in range(0, recipe.batch, size)
        ]

    def _count_bad(self, norm: float) -> None:
        self._num_bad = 0 if math.isfinite(norm) else self._num_bad + 1
        if self._num_bad >= MAX_BAD_STEPS:
            raise TrainingError(
                f"the gradients of the last {MAX_BAD_STEPS} steps were not finite; lower "
                "optimizer.learning_rate, or look at the data. The last good state is kept."
            )

    def _look(self) -> HeldOutReport:
        looking, stream = self.recipe.held_out, self.setup.held_out
        assert looking is not None
        assert stream is not None
        return look_at_held_out(
            self.lm.stack,
            stream,
            self.setup.canvases,
            step=self._step,
            num_examples=looking.examples,
            batch_len=self.recipe.micro_batch or self.recipe.batch,
        )

    def _save(self) -> None:
        facts = {
            "step": self._step,
            "tokens": self._tokens,
            "num_bad": self._num_bad,
            "num_records": self.setup.stream.num_records,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "recipe": self._plain,
        }
        self.directory.save_state(self._step, facts, self._optimizer.tensors(), self.recipe.saving.keep)

    def _write_result(self) -> None:
        target = self.directory.result[self.recipe.train]
        if self.recipe.train == "lora":
            self.lm.save_adapter(target, overwrite=True)
        elif self._step > self.start_step or not (target / "config.json").exists():
            # Not only the first time: a run at a constant rate can be made longer.
            made = target.with_name("model.new")
            shutil.rmtree(made, ignore_errors=True)
            self.lm.save(made)
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)

    def _refuse_changed(self, facts: dict[str, Any]) -> None:
        before = facts.get("recipe")
        if before is None:
            return
        before = with_new_entries(before, self.recipe)
        free = {*_FREE, *(("steps",) if self.recipe.optimizer.decay == "constant" else ())}
        changed = differences(
            {k: v for k, v in before.items() if k not in free},
            {k: v for k, v in self._plain.items() if k not in free},
        )
        if changed:
            raise InputError(
                f"{self.directory.path} holds a run of another recipe: {'; '.join(changed[:3])}. "
                "Take the same recipe to go on, or another out to begin anew."
            )

    def _check_surroundings(self, facts: dict[str, Any]) -> None:
        records, now = facts.get("num_records"), self.setup.stream.num_records
        if records != now:
            raise InputError(
                f"the data had {records} records when this run began and has {now} now; take the same data "
                "to go on, or another out to begin anew."
            )
        for name, here in (("torch", torch.__version__), ("threads", torch.get_num_threads())):
            if facts.get(name) != here:
                self.notes.append(f"begun with {name} {facts.get(name)}, here {here}: bits may differ")


class _Sayer:
    """One report to everyone who wants it."""

    def __init__(self, listener: Listener, log: RunLog, events: EventFile | None) -> None:
        self._listener, self._log, self._events = listener, log, events

    def __call__(self, report: Report) -> None:
        self._log.write(report)
        if self._events is not None:
            self._events.scalars(report.step, report.scalars())
        if isinstance(report, StepReport):
            self._listener.step(report)
        else:
            self._listener.held_out(report)


class _Speed:
    """Smoothed over about ten steps."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._steps = 0.0

    def add(self, num_tokens: int, seconds: float) -> float:
        self._tokens = 0.9 * self._tokens + num_tokens
        self._seconds = 0.9 * self._seconds + seconds
        self._steps = 0.9 * self._steps + 1
        return self._tokens / max(self._seconds, 1e-9)

    @property
    def seconds_per_step(self) -> float:
        return self._seconds / self._steps


@contextmanager
def _events(recipe: Recipe, directory: RunDirectory, step: int) -> Iterator[EventFile | None]:
    if not recipe.tensorboard:
        yield None
        return
    with EventFile(directory.path / "tensorboard", start_step=step) as events:
        yield events


@contextmanager
def deterministic() -> Iterator[None]:
    """Algorithms whose bits do not depend on chance, while a run runs."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Else every new tensor is written twice; what we read, we have written.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
