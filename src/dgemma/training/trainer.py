"""The training loop. A run resumes from a saved state with the same bits.

There is no random state between steps: data order and noise are functions of (seed, presentation), and
presentation numbers follow from the step. A saved state is the weights, the optimizer's moments and the step.
"""

from __future__ import annotations

import enum
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.deterministic
from torch.distributed.device_mesh import DeviceMesh

from dgemma.durable_files import sync_directory
from dgemma.errors import InputError, TrainingError
from dgemma.language_model import LanguageModel
from dgemma.model.ranks import ALONE, GroupRanks
from dgemma.training.callbacks import CallbackList, TrainerCallback, callbacks_of
from dgemma.training.curves import CURVES_NAME, write_curves
from dgemma.training.data.canvases import TrainingBatch, make_batch
from dgemma.training.data.records import Progress
from dgemma.training.held_out import LossSums, evaluate_held_out
from dgemma.training.objective import token_losses, with_settled_targets
from dgemma.training.optimizer import Optimizer, TrainedWeights, learning_rate
from dgemma.training.recipe import Recipe
from dgemma.training.recipe_file import to_plain, with_new_entries
from dgemma.training.report import HeldOutReport, RunLog, StepReport
from dgemma.training.reward import backward, follow, load_reward, rollout_answers
from dgemma.training.rollout import Path
from dgemma.training.run_directory import RunDirectory, differences
from dgemma.training.setup import prepare, resolve_precision

MAX_BAD_STEPS = 10
# Recipe entries that may change when a run is resumed: they do not affect its result.
_RESUMABLE_ENTRIES = ("out", "saving", "held_out", "callbacks", "tensorboard")


class TrainingOutcome(enum.Enum):
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


class Trainer:
    """One run, new or resumed: `Trainer(recipe).run()`.

    callbacks: called after those that the recipe names. lm: a loaded model, in place of `recipe.model`.
    mesh: processes that train the model together, each with a part of every weight (FSDP2): all of them run
      the same program. The first one writes the log and calls the callbacks.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        lm: LanguageModel | None = None,
        mesh: DeviceMesh | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.directory = RunDirectory(recipe.out)
        self.ranks = ranks = ALONE if mesh is None else GroupRanks.of_mesh(mesh)
        self.callbacks = (
            [*callbacks_of(recipe.callbacks, self.directory.path), *callbacks] if ranks.leads else []
        )
        facts, damaged = ranks.share(self.directory.newest() if ranks.leads else None)
        recipe = resolve_precision(recipe, begun_with=facts.get("recipe", {}).get("precision"), lm=lm)
        self.recipe, self._plain = recipe, to_plain(recipe)
        self._check_same_recipe(facts)
        self.setup = prepare(recipe, lm=lm, mesh=mesh, progress=progress)
        self._weights = TrainedWeights(self.setup.trained)
        self._optimizer = Optimizer(self._weights, recipe.optimizer)
        self.notes = [f"{text} Going on from step {facts['step']}." for text in damaged]
        if facts:
            self._check_environment(facts)
            self._optimizer.restore(self.directory.load_state(facts["step"], self._weights.masters, ranks))
        self.start_step = self._step = int(facts.get("step", 0))
        self._tokens = int(facts.get("tokens", 0))
        self._num_bad = int(facts.get("num_bad", 0))
        self._speed = _Speed()
        self._reward = load_reward(recipe.rollout.reward) if recipe.objective == "reward" else None

    @property
    def lm(self) -> LanguageModel:
        return self.setup.lm

    @property
    def num_trained(self) -> int:
        return self._weights.num_parameters

    def run(
        self, view: TrainerCallback | None = None, should_stop: Callable[[], bool] = lambda: False
    ) -> TrainingOutcome:
        """Train to the last step, or until `should_stop`: the state is saved, and a later run resumes it.

        view: one more callback, for a display that needs the start step of the trainer.
        """
        callbacks = CallbackList([*self.callbacks, *([] if view is None else [view])])
        outcome: TrainingOutcome | None = None
        with ExitStack() as opened:
            opened.enter_context(deterministic())
            opened.enter_context(self.ranks.bounded())
            if not self.ranks.leads:
                return self._run(callbacks, None, should_stop)
            opened.enter_context(self.directory.locked())
            self.directory.drop_after(self._step)
            self.directory.write_recipe(self._plain)
            log = opened.enter_context(RunLog(self.directory.path, start_step=self._step))
            try:
                callbacks.on_start(self._step)
                for text in self.notes:
                    callbacks.on_note(text)
                found = self._run(callbacks, log, should_stop)
                self._write_curves(callbacks)
                outcome = found
            finally:
                callbacks.on_end(outcome)
        return outcome

    def _run(
        self, callbacks: TrainerCallback, log: RunLog | None, should_stop: Callable[[], bool]
    ) -> TrainingOutcome:
        """log: of the first process alone."""
        saving, held_out = self.recipe.saving, self.recipe.held_out
        if held_out is not None and self._step == 0:
            self._evaluate(callbacks, log)
        while self._step < self.recipe.steps:
            report = self._do_step()
            if not math.isfinite(report.grad_norm):
                callbacks.on_note(f"step {self._step}: gradients are not finite; nothing was changed")
            if log is not None:
                log.write(report)
            callbacks.on_step(report)
            last = self._step == self.recipe.steps
            if held_out is not None and (last or self._step % held_out.every == 0):
                self._evaluate(callbacks, log)
            stopping = any(self.ranks.exchange(should_stop()))
            if stopping or last or self._step % saving.every == 0:
                if log is not None:
                    log.sync()  # the log has every step of a state
                self._save()
                callbacks.on_save(self._step)
            if stopping and not last:
                return TrainingOutcome.INTERRUPTED
        self._write_result()
        return TrainingOutcome.FINISHED

    def _evaluate(self, callbacks: TrainerCallback, log: RunLog | None) -> None:
        report = self._held_out_report()
        if log is not None:
            log.write(report)
        callbacks.on_eval(report)

    def _write_curves(self, callbacks: TrainerCallback) -> None:
        try:
            write_curves(self.directory.path)
        except InputError as error:  # matplotlib is not installed: the log has everything
            callbacks.on_note(f"{CURVES_NAME} was not drawn: {error}")

    def _do_step(self) -> StepReport:
        started = time.monotonic()
        recipe = self.recipe
        examples, batches = self._batches()
        if recipe.objective == "reward":
            sums = self._learn_from_rewards(batches)
        else:
            sums = self._learn_tokens(batches)
        sums = sums.of_all(self.ranks)
        rate = learning_rate(self._step, recipe.steps, recipe.optimizer)
        norm = self._optimizer.step(rate)
        self._step += 1
        self._count_bad(norm)
        own_tokens = self._num_encoded(examples, batches) + sum(batch.clean.numel() for batch in batches)
        num_tokens = sum(self.ranks.exchange(own_tokens))
        self._tokens += num_tokens
        seconds = time.monotonic() - started
        speed = self._speed.add(num_tokens, seconds)
        diffusion, encoder_loss = sums.means
        return StepReport(
            step=self._step,
            num_steps=recipe.steps,
            loss=diffusion + recipe.noise.encoder_weight * encoder_loss
            if sums.reward is None
            else -sums.reward,
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
            reward=sums.reward,
            path_steps=sums.path_steps,
        )

    def _learn_tokens(self, batches: list[TrainingBatch]) -> LossSums:
        """The gradients of both cross-entropies."""
        recipe, setup = self.recipe, self.setup
        counted = self.ranks.exchange(
            (
                sum(float(batch.weights.sum()) for batch in batches),
                sum(float(batch.encoder_weights.sum()) for batch in batches),
                [len(batch.guessed) for batch in batches],
            )
        )
        num_diffusion, num_encoder = (sum(counts) for counts in list(zip(*counted, strict=True))[:2])
        num_guesses = [max(counts) for counts in zip(*(passes for *_, passes in counted), strict=True)]
        sums = LossSums()
        for batch, guesses in zip(batches, num_guesses, strict=True):
            batch = batch.with_guesses(guesses).to(self.lm.device)
            if setup.teacher is not None and setup.sampler is not None:
                batch = with_settled_targets(setup.teacher, batch, setup.sampler)
            losses = token_losses(self.lm.transformer, batch, sampler=setup.sampler)
            # Means over all tokens of the step, so that the result does not depend on micro-batches.
            loss = (losses.diffusion * batch.weights).sum() / num_diffusion
            if recipe.noise.encoder_weight:
                encoder = (losses.encoder * batch.encoder_weights).sum() / num_encoder
                loss = loss + recipe.noise.encoder_weight * encoder
            (loss * self.ranks.size).backward()  # several processes take the mean of their gradients
            self._weights.collect_gradients()
            sums.add(losses, batch)
        return sums

    def _learn_from_rewards(self, batches: list[TrainingBatch]) -> LossSums:
        """The policy gradients of all paths."""
        rollout, sampler = self.recipe.rollout, self.setup.sampler
        assert sampler is not None
        num_paths = sum(len(batch.clean) for batch in batches) * rollout.samples
        sums = LossSums()
        for batch in batches:
            batch = batch.to(self.lm.device)
            found = follow(
                self.lm.transformer,
                batch,
                sampler,
                partial(self._judge, batch),
                samples=rollout.samples,
                num_steps=rollout.steps,
            )
            backward(self.lm.transformer, found, num_paths=num_paths)
            self._weights.collect_gradients()
            sums.add_paths(found.rewards, found.path.end.steps)
        return sums

    def _judge(self, batch: TrainingBatch, path: Path) -> list[float]:
        """The reward of each path."""
        rollout, sampler = self.recipe.rollout, self.setup.sampler
        assert sampler is not None
        assert self._reward is not None
        num_steps = min(rollout.steps, sampler.num_steps)  # after so many the sampler ends a canvas, too
        answers = rollout_answers(self.lm, batch, path, rollout.samples, num_steps)
        return [float(self._reward(answer)) for answer in answers]

    def _num_encoded(self, examples: list[Any], batches: list[TrainingBatch]) -> int:
        """Tokens that the encoder reads, without padding."""
        if self.setup.canvases.encode_answers:
            return sum(len(example.tokens) for example in examples)
        each = self.setup.canvases.per_example
        return sum(int(batch.starts.view(-1, each).amax(1).sum()) for batch in batches)

    def _batches(self) -> tuple[list[Any], list[TrainingBatch]]:
        """The examples of this process, and its forwards."""
        recipe = self.recipe
        count = recipe.batch // self.ranks.size
        first = self._step * recipe.batch + self.ranks.rank * count
        examples = self.setup.stream.take(first, count)
        size = min(recipe.micro_batch or count, count)
        batches = []
        for at in range(0, count, size):
            part = examples[at : at + size]
            numbers = range(first + at, first + at + len(part))
            batches.append(make_batch(part, numbers, self.setup.canvases))
        return examples, batches

    def _count_bad(self, norm: float) -> None:
        self._num_bad = 0 if math.isfinite(norm) else self._num_bad + 1
        if self._num_bad >= MAX_BAD_STEPS:
            raise TrainingError(
                f"the gradients of the last {MAX_BAD_STEPS} steps were not finite; lower "
                "optimizer.learning_rate, or check the data. The last good state is kept."
            )

    def _held_out_report(self) -> HeldOutReport:
        held_out, stream = self.recipe.held_out, self.setup.held_out
        assert held_out is not None
        assert stream is not None
        return evaluate_held_out(
            self.lm.transformer,
            stream,
            self.setup.canvases,
            step=self._step,
            num_examples=held_out.examples,
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
            "processes": self.ranks.size,
            "recipe": self._plain,
        }
        tensors, keep = self._optimizer.tensors(), self.recipe.saving.keep
        if self.ranks.size == 1:
            self.directory.save_state(self._step, facts, tensors, keep)
            return
        from dgemma.training.sharded_state import write_sharded

        write = partial(write_sharded, tensors=tensors, ranks=self.ranks)
        self.directory.save_state_by(self._step, facts, write, keep, self.ranks)

    def _write_result(self) -> None:
        lm, target = self.lm, self.directory.result[self.recipe.train]
        if self.ranks.size > 1:
            from dgemma.training.shards import gathered

            lm = lm.with_transformer(gathered(lm.transformer, self.setup.trained, keep=self.ranks.leads))
            if not self.ranks.leads:
                return
        if self.recipe.train == "lora":
            lm.save_adapter(target, overwrite=True)
        elif self._step > self.start_step or not (target / "config.json").exists():
            # Also when a result exists: a run at a constant learning rate can be extended.
            new = target.with_name("model.new")
            shutil.rmtree(new, ignore_errors=True)
            lm.save(new)
            shutil.rmtree(target, ignore_errors=True)
            new.rename(target)
            sync_directory(target.parent)

    def _check_same_recipe(self, facts: dict[str, Any]) -> None:
        saved = facts.get("recipe")
        if saved is None:
            return
        saved = with_new_entries(saved, self.recipe)
        free = {*_RESUMABLE_ENTRIES, *(("steps",) if self.recipe.optimizer.decay == "constant" else ())}
        changed = differences(
            {k: v for k, v in saved.items() if k not in free},
            {k: v for k, v in self._plain.items() if k not in free},
        )
        if changed:
            raise InputError(
                f"{self.directory.path} holds a run of another recipe: {'; '.join(changed[:3])}. "
                "Take the same recipe to go on, or another out to begin anew.",
                field="out",
            )

    def _check_environment(self, facts: dict[str, Any]) -> None:
        records, now = facts.get("num_records"), self.setup.stream.num_records
        if records != now:
            raise InputError(
                f"the data had {records} records when this run began and has {now} now; take the same data "
                "to go on, or another out to begin anew.",
                field="data",
            )
        for name, before, here in (
            ("torch", facts.get("torch"), torch.__version__),
            ("threads", facts.get("threads"), torch.get_num_threads()),
            ("processes", facts.get("processes", 1), self.ranks.size),
        ):
            if before != here:
                self.notes.append(f"begun with {name} {before}, here {here}: bits may differ")


class _Speed:
    """Training speed, smoothed over about ten steps."""

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
def deterministic() -> Iterator[None]:
    """Use torch's deterministic algorithms inside the block."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Otherwise torch fills every new tensor; training writes each tensor before it reads it.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
