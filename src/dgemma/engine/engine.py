"""The engine: schedule a step, run it, process its outputs (continuous batching).

Not thread safe: `step`, `add` and `cancel` are called one after another; only `validate` and `stats` may be
called during a step. An error ends only the request it belongs to: a batched computation that fails is
repeated for each request alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dgemma.engine.batch_runner import BatchRunner, Fault
from dgemma.engine.canvas_pins import pin_canvas, pinned_log_probs, pinned_tokens
from dgemma.engine.canvas_store import CanvasStore
from dgemma.engine.causal_sampling import draft_tokens, sample_tokens, score_chunk, verify_drafts
from dgemma.engine.constraint_state import ConstraintState
from dgemma.engine.decode_cost import DecodeChooser, DecodeCost
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.kv_store import KVStore
from dgemma.engine.model_runner import (
    Canvases,
    PromptChunk,
    Stepped,
    canvas_noise,
    forward,
    sample_canvases,
)
from dgemma.engine.output import OutputBuilder
from dgemma.engine.request import EngineRequest, ValidatedRequest, validate_request
from dgemma.engine.scheduler import (
    COMMIT,
    DENOISE,
    PREFILL,
    VERIFY,
    QueuedRequest,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from dgemma.engine.sequence import Encoded, SampleOutput, SequenceState
from dgemma.engine.service import EngineStats, Failed
from dgemma.errors import InputError, RankError
from dgemma.events import Event, LogProbs, PromptScored
from dgemma.model.kv_cache import PastKeysValues
from dgemma.model.transformer import Transformer
from dgemma.params import GenerationParams
from dgemma.sampling.rng import NoiseStream, noise_key
from dgemma.sampling.sampler import make_sampler, open_canvas
from dgemma.text.tokenizer import Tokenizer

# Turns of a conversation after which another request may continue: the instructions, and the last few.
_FIRST_TURNS, _LAST_TURNS = 1, 3

# Positions of one vocabulary scan: its tensors grow with them, and large ones are slow to allocate on a CPU
# (a fifth of a step of 16 canvases, measured).
_MAX_POSITIONS = 1024


@dataclass(frozen=True)
class _Computed:
    """The result of a forward for one sequence: an encoded chunk, a denoised canvas, or both."""

    encoded: Encoded | None
    hidden: Tensor | None  # of the canvas
    past: PastKeysValues | None  # of the canvas


Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine:
    """`models`: the base under None, and its adapters by name."""

    heartbeat_s: float | None = None  # a step at least so often, though there is nothing to do

    def __init__(
        self,
        models: Mapping[str | None, Transformer],
        kv_manager: KVCacheManager,
        limits: SchedulerConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        fault: Fault = lambda point, request_ids: None,
    ) -> None:
        base = models[None]
        self._models = models
        self._config = base.config
        self._device = base.norm.weight.device
        self._kv_manager = kv_manager
        self._limits = limits
        self._scheduler = Scheduler(kv_manager, limits)
        dtype = base.embedding.dtype
        self._store = KVStore(base.part.attention, kv_manager, dtype=dtype, device=self._device)
        self._canvases = CanvasStore(base.config, limits.max_num_seqs, dtype=dtype, device=self._device)
        self._tokenizer = tokenizer
        self._costs = {name: DecodeCost.of(model, self._device.type) for name, model in models.items()}
        self._clock = clock
        self._fault = fault
        self._sequences: dict[int, SequenceState] = {}
        self._scheduled: dict[int, ScheduledSequence] = {}  # of the step under way, by request
        self._next = 0
        self._began = 0.0
        self._last_step_s = 0.0
        self.num_computed = 0  # sequences of the last step
        self._outputs: list[tuple[int, Event | Failed]] = []
        self._hit_tokens = 0
        self._batches = BatchRunner(limits.max_num_seqs, self._fail, fault)
        names = (
            "steps",
            "prefill_tokens",
            "denoise_forwards",
            "commit_tokens",
            "verify_tokens",
        )
        self._counters = dict.fromkeys(names, 0)

    @property
    def is_idle(self) -> bool:
        return not self._sequences

    @property
    def max_len(self) -> int:
        """The longest context for which there is memory."""
        return self._kv_manager.max_len

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def num_waiting_of(self, tenant: str) -> int:
        return self._scheduler.num_waiting_of(tenant)

    def is_waiting(self, request_id: int) -> bool:
        """Whether the request has not begun."""
        return self._scheduler.is_waiting(request_id)

    @property
    def num_free_slots(self) -> int:
        return self._limits.max_num_seqs - self._scheduler.num_running

    def stats(self) -> EngineStats:
        return EngineStats(
            slots_used=self._scheduler.num_running,
            slots_total=self._limits.max_num_seqs,
            full_blocks_used=self._kv_manager.full.num_used,
            full_blocks_total=self._kv_manager.full.size,
            window_blocks_used=self._kv_manager.window.num_used,
            window_blocks_total=self._kv_manager.window.size,
            num_waiting=self._scheduler.num_waiting,
            prefix_hit_tokens=self._hit_tokens,
            counters={**self._counters, "out_of_memory": self._batches.num_out_of_memory},
        )

    def validate(self, request: EngineRequest, *, prompt_name: str = "the prompt") -> ValidatedRequest:
        """Raise `InputError` if the model cannot take the request. May be called during a step."""
        return validate_request(
            request,
            self._config,
            adapters=self._models.keys(),
            prompt_name=prompt_name,
        )

    def check_capacity(self, request: ValidatedRequest) -> None:
        """Raise `InputError` if the request could never be admitted."""
        if not self._kv_manager.fits(request.max_len):
            raise InputError(
                f"prompt and answer may grow to {request.max_len} tokens, for which there is no memory. "
                "Lower max_tokens, shorten the prompt, or give the engine more memory.",
                code="context_length_exceeded",
            )

    def reserve(self, requests: Iterable[ValidatedRequest]) -> None:
        """Grow the KV cache, if necessary, for as many of the requests as can run at once."""
        lengths = sorted((request.max_len for request in requests), reverse=True)
        self._kv_manager.ensure_capacity(lengths[: self._limits.max_num_seqs])
        self._store.resize()

    def add(self, validated: ValidatedRequest, *, arrived: float | None = None) -> int:
        """Queue a request -> its id. `arrived`: by the engine's clock, if not now."""
        request, max_tokens, decode = validated.request, validated.max_tokens, validated.decode
        params, now = request.params, self._clock() if arrived is None else arrived
        request_id = self._next
        ends = [at + 1 for at, token in enumerate(request.prompt) if token in params.end_tokens]
        entry = QueuedRequest(
            request_id=request_id,
            tokens=request.prompt,
            images=request.images,
            max_len=validated.max_len,
            root=request.cache_root,
            # A cached token has no hidden state to score the next one from.
            reusable=None if request.scored_from is None else request.scored_from - 1,
            turns=(*ends[:_FIRST_TURNS], *ends[-_LAST_TURNS:]),
            priority=request.priority,
            deadline=None if params.deadline_s is None else now + params.deadline_s,
            tenant=request.tenant,
            max_tenant_seqs=request.max_tenant_seqs,
        )
        output = OutputBuilder(
            row=request.row,
            seed=request.seed,
            max_tokens=max_tokens,
            params=params,
            tokenizer=self._tokenizer,
            pinned=request.pinned,
            complete_after=() if request.constraint is None else request.constraint.complete_after,
            scores_prompt=request.prompt_logprobs is not None,
        )
        chooser = None
        if decode == "auto":
            chooser = DecodeChooser(self._costs[request.adapter])
        sequence = SequenceState(
            request_id=request_id,
            request=request,
            output=output,
            sampler=request.sampler or make_sampler(_canvas_params(params, decode)),
            decode=decode if chooser is None else chooser.choice,
            chooser=chooser,
            arrived=now,
            max_canvas_len=validated.canvas_len,
            max_positions=self._config.max_positions,
            refines=decode not in ("causal", "score"),
            constraint_state=None
            if request.constraint is None
            else ConstraintState(request.constraint, max_tokens, request.pinned),
            context=list(request.prompt),
        )
        # Last, when nothing can fail any more: the scheduler and the engine both have the request, or
        # neither.
        self._scheduler.add(entry, now)
        self._sequences[request_id] = sequence
        self._next += 1
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request. Its slot and blocks are free for the next step."""
        if self._sequences.pop(request_id, None) is not None:
            self._scheduler.remove(request_id)

    @torch.inference_mode()
    def step(self, paused: Collection[int] = ()) -> list[tuple[int, Event | Failed]]:
        """Run one step of all sequences that are not paused -> their events, by request id."""
        self._began = self._clock()
        self._outputs = []
        self._scheduled = {}
        self._run(*self._plan(paused))
        return self._outputs

    def _plan(self, paused: Collection[int]) -> tuple[SchedulerOutput, Collection[int]]:
        """Finish what is late, and schedule the rest."""
        self._expire_all(list(self._late()))
        return self._scheduler.schedule(self._began), paused

    def _run(self, plan: SchedulerOutput, paused: Collection[int]) -> None:
        self._expire_all(plan.expired)
        for request_id in plan.admitted:
            sequence = self._sequences[request_id]
            sequence.cached = self._scheduler.block_table(request_id).num_cached
            sequence.queue_s = self._began - sequence.arrived
            self._hit_tokens += sequence.cached
        batch = [(self._sequences[w.request_id], w) for w in plan.scheduled if w.request_id not in paused]
        self._scheduled = {scheduled.request_id: scheduled for _, scheduled in batch}
        for group in _group_by(batch, lambda item: item[0].request.adapter):
            max_rows = self._batches.max_rows
            for begin in range(0, len(group), max_rows):
                rows = group[begin : begin + max_rows]
                self._compute(self._models[group[0][0].request.adapter], rows)
        self._batches.end_step()
        self.num_computed = len(batch)
        if batch:
            self._counters["steps"] += 1
            self._last_step_s = self._clock() - self._began
        for sequence, _ in batch:
            if sequence.request_id in self._sequences:
                self._count_time(sequence, self._last_step_s)

    def _compute(self, model: Transformer, batch: Sequence[tuple[SequenceState, ScheduledSequence]]) -> None:
        """Run a step of all sequences under one adapter: forward, store, sample, process outputs."""
        to_sample: list[tuple[SequenceState, ScheduledSequence, Tensor]] = []
        for (sequence, scheduled), computed in self._batches.run(
            "forward", batch, lambda items: self._forward(model, items)
        ):
            hidden = computed.hidden
            if computed.encoded is not None:
                hidden = self._run_isolated(sequence, self._store_encoded, sequence, scheduled, computed)
            if hidden is not None:
                to_sample.append((sequence, scheduled, hidden))
        for alike in _group_by(to_sample, lambda item: item[0].sampling_key()):
            together = max(1, _MAX_POSITIONS // alike[0][2].shape[0])
            for begin in range(0, len(alike), together):
                some = alike[begin : begin + together]
                for (sequence, scheduled, _), (sample, stepped) in self._batches.run(
                    "sample", some, lambda items: self._sample(model, items)
                ):
                    # Counted here, not in `_sample`, which is repeated when a batch fails.
                    self._counters["denoise_forwards"] += stepped is not None
                    self._run_isolated(sequence, self._process_output, sequence, scheduled, sample, stepped)

    def _forward(
        self, model: Transformer, batch: Sequence[tuple[SequenceState, ScheduledSequence]]
    ) -> list[_Computed]:
        """Encode the chunks and denoise the canvases of a batch.

        May be repeated: what it writes (a new canvas) depends on the sequence's own state alone, and is the
        same the next time.
        """
        chunks: list[PromptChunk] = []
        # Of canvases, by length and slot.
        pasts: defaultdict[int, dict[int, PastKeysValues]] = defaultdict(dict)
        for sequence, scheduled in batch:
            if scheduled.phase is DENOISE:
                assert sequence.past is not None
                pasts[sequence.canvas_len][scheduled.slot] = sequence.past
                continue
            table = self._scheduler.block_table(scheduled.request_id)
            tokens = sequence.context[scheduled.start : scheduled.stop]
            canvas = None
            if scheduled.phase is VERIFY:
                assert sequence.draft is not None
                tokens = sequence.draft
            elif scheduled.is_last and sequence.has_canvas and sequence.has_free:
                # Its next canvas is opened, and denoised in the same forward.
                canvas = self._store.read(table, space=sequence.canvas_len, gap=len(tokens))
                key = noise_key([sequence.output.seed], [sequence.output.canvas], [0], self._device)
                noise = canvas_noise(
                    sequence.sampler, key, NoiseStream.OPEN, sequence.canvas_len, self._config
                )
                pin_canvas(sequence, self._device)
                noise = noise if sequence.pins is None else sequence.pins.open(noise)
                if sequence.leftover:  # of the last draft: what the causal pass did not come to
                    leftover = torch.tensor(sequence.leftover[: sequence.canvas_len], device=self._device)
                    noise[0, : len(leftover)] = leftover
                self._canvases.write([scheduled.slot], open_canvas(noise), None)
                pasts[sequence.canvas_len][scheduled.slot] = canvas
            images = sequence.images_from(scheduled.start, scheduled.stop)
            chunks.append(PromptChunk(tokens, self._store.read(table), canvas, images))
        canvases = []
        for canvas_len, own in pasts.items():
            state, soft = self._canvases.read(list(own), canvas_len)
            canvases.append(Canvases(state.canvas, soft, list(own.values())))
        encoded, hidden = forward(model, chunks, canvases)
        next_encoded = iter(encoded)
        computed = {
            slot: (states, past)
            for own, rows in zip(pasts.values(), hidden, strict=True)
            for (slot, past), states in zip(own.items(), rows, strict=True)
        }
        return [
            _Computed(
                next(next_encoded) if scheduled.phase.extends else None,
                *computed.get(scheduled.slot, (None, None)),
            )
            for _, scheduled in batch
        ]

    def _store_encoded(
        self, sequence: SequenceState, scheduled: ScheduledSequence, computed: _Computed
    ) -> Tensor | None:
        """Append encoded tokens to the KV cache -> the hidden states to sample from, if any."""
        encoded = computed.encoded
        assert encoded is not None
        if scheduled.phase is VERIFY:
            assert sequence.last_hidden is not None
            sequence.verified = encoded  # stored as far as it is accepted
            return torch.cat([sequence.last_hidden, encoded.hidden])
        block_table = self._scheduler.allocate(scheduled)
        self._store.write(
            block_table, scheduled.start, scheduled.stop, encoded.fresh, encoded.row, encoded.skip
        )
        self._counters[f"{scheduled.phase.name}_tokens"] += scheduled.stop - scheduled.start
        over = self._scheduler.mark_computed(scheduled)
        if sequence.request.scored_from is not None and scheduled.phase is PREFILL:
            self._score(sequence, sequence.request.scored_from, scheduled, encoded)
        if not over or not sequence.has_canvas:
            return encoded.hidden[-1:] if over and sequence.is_causal else None
        if sequence.is_verified:
            sequence.last_hidden = encoded.hidden[-1:].clone()
        if not sequence.has_free:  # every position is pinned: nothing to denoise
            sequence.refines = False
            self._settle(sequence, pinned_tokens(sequence), steps=0)
            return None
        sequence.past = computed.past
        sequence.steps, sequence.sample = 0, None
        self._scheduler.set_phase(scheduled.request_id, DENOISE)
        return computed.hidden

    def _sample(
        self, model: Transformer, items: Sequence[tuple[SequenceState, ScheduledSequence, Tensor]]
    ) -> Sequence[tuple[SampleOutput, Stepped | None]]:
        """Sample -> the outputs, and the canvases after the step. Writes nothing."""
        sequences = [sequence for sequence, _, _ in items]
        if sequences[0].draft is not None:
            found = verify_drafts(model, sequences, [states for _, _, states in items])
            return [(sample, None) for sample in found]
        hidden = torch.stack([states for _, _, states in items])
        if sequences[0].is_causal:
            return [(sample, None) for sample in sample_tokens(model, sequences, hidden)]
        slots = [scheduled.slot for _, scheduled, _ in items]
        state, _ = self._canvases.read(slots, sequences[0].canvas_len)
        sampled = sample_canvases(model, state, sequences, hidden)
        return [
            (replace(sample, guess=draft_tokens(model, sequence, sample, states)), stepped)
            if sample.settled and sequence.is_verified
            else (sample, stepped)
            for sequence, states, (sample, stepped) in zip(sequences, hidden, sampled, strict=True)
        ]

    def _process_output(
        self,
        sequence: SequenceState,
        scheduled: ScheduledSequence,
        sample: SampleOutput,
        stepped: Stepped | None,
    ) -> None:
        """Write the stepped canvas, then emit a draft, and a commit if the canvas has settled."""
        if sample.accepted is not None:
            self._accept(sequence, scheduled, sample)
            return
        if stepped is not None:
            self._canvases.write([scheduled.slot], stepped.state, stepped.soft)
        sequence.sample = sample
        guess = sample.guess.tolist() if sample.settled or sequence.request.drafts else []
        if not sequence.is_causal:
            sequence.steps += 1
            if sequence.request.drafts:
                self._emit(sequence, sequence.output.draft(guess, sample.entropy.tolist(), sequence.steps))
            if sequence.request.trace and stepped is not None:
                self._emit(sequence, sequence.canvas_step(sample, stepped.state, self._clock()))
        if sample.settled and sequence.is_verified:
            self._draft(sequence, guess)
        elif sample.settled:
            self._settle(sequence, guess, steps=sequence.steps, sample=sample)
        elif stepped is not None and sequence.cut_canvas(stepped.state):
            pin_canvas(sequence, self._device)

    def _draft(self, sequence: SequenceState, guess: list[int]) -> None:
        """Have the causal pass check a canvas, up to its end token and to max_tokens."""
        ends = () if sequence.request.params.ignore_end else sequence.request.params.end_tokens
        length = next((at + 1 for at, token in enumerate(guess) if token in ends), len(guess))
        left = sequence.output.max_tokens - len(sequence.output.tokens)
        sequence.past = None
        sequence.draft = guess[: min(length, left)]
        sequence.leftover = guess
        self._scheduler.set_phase(sequence.request_id, VERIFY, sequence.draft)

    def _accept(self, sequence: SequenceState, scheduled: ScheduledSequence, sample: SampleOutput) -> None:
        """Commit what is accepted of a draft, and the token after it, which is still to be encoded.

        At max_tokens there is none after it; then the last of the draft stays as it is.
        """
        encoded, tokens = sequence.verified, sample.guess.tolist()
        assert encoded is not None
        kept = self._scheduler.keep(scheduled, tokens[:-1])
        if len(tokens) > 1:
            block_table = self._scheduler.allocate(kept)
            self._store.write(block_table, kept.start, kept.stop, encoded.fresh, encoded.row, encoded.skip)
            self._scheduler.mark_computed(kept)
        self._counters["verify_tokens"] += scheduled.stop - scheduled.start
        sequence.context += tokens[:-1]
        sequence.draft = sequence.verified = None
        sequence.leftover = sequence.leftover[len(tokens) :]
        self._settle(sequence, tokens, steps=sequence.steps, sample=sample)

    def _settle(
        self, sequence: SequenceState, guess: list[int], *, steps: int, sample: SampleOutput | None = None
    ) -> None:
        """Commit a canvas or token; finish the request, or queue the tokens for the KV cache."""
        sequence.past = None
        logprobs: list[LogProbs] | None = [((token, 0.0),) for token in guess]  # fixed, so certain
        watched = pinned_log_probs(sequence)
        if sample is not None:
            logprobs, watched = sample.logprobs(), sample.watched
        if sequence.constraint_state is not None:
            sequence.constraint_state.advance(len(sequence.output.tokens), guess)
        accepted = None if sample is None else sample.accepted
        self._emit(
            sequence,
            sequence.output.commit(guess, steps=steps, logprobs=logprobs, watched=watched, accepted=accepted),
        )
        sequence.first_commit_s = sequence.first_commit_s or self._clock() - sequence.arrived
        if sequence.output.reason is not None:
            self._finish(sequence)
        else:
            new = guess if accepted is None else guess[-1:]
            sequence.choose_decode(steps, len(guess))
            sequence.size_canvas()
            sequence.context += new
            self._scheduler.set_phase(sequence.request_id, COMMIT, new)

    def _score(
        self, sequence: SequenceState, score_from: int, scheduled: ScheduledSequence, encoded: Encoded
    ) -> None:
        """Score the token after each token of a chunk. After the last chunk, finish a request that only
        scores."""
        score_chunk(self._models[sequence.request.adapter], sequence, encoded, scheduled.start, score_from)
        if scheduled.stop < len(sequence.context):
            return
        if (scored := sequence.output.prompt_logprobs) is not None:
            self._emit(sequence, PromptScored(row=sequence.request.row, logprobs=tuple(scored)))
        if sequence.decode == "score":
            sequence.output.end()
            self._finish(sequence)

    def _late(self) -> Iterator[int]:
        """Requests whose deadline falls within the next step, if they have something to return."""
        soon = self._began + self._last_step_s
        for sequence in self._sequences.values():
            if sequence.has_shown and sequence.deadline <= soon:
                yield sequence.request_id

    def _expire_all(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            sequence = self._sequences[request_id]
            self._run_isolated(sequence, self._expire, sequence)

    def _expire(self, sequence: SequenceState) -> None:
        """Finish at the deadline with the best guess so far, marked as provisional."""
        # A draft is not shown: "lossless" promises a beginning of the causal text.
        sample = sequence.sample if sequence.past is not None and not sequence.is_verified else None
        commit = sequence.output.commit(
            [] if sample is None else sample.guess.tolist(),
            steps=0 if sample is None else sequence.steps,
            settled=sample is None,
            is_late=True,
            logprobs=None if sample is None else sample.logprobs(),
        )
        if commit.tokens or commit.text or commit.thought:
            self._emit(sequence, commit)
        self._finish(sequence)

    def _finish(self, sequence: SequenceState) -> None:
        now = self._clock()
        self._count_time(sequence, now - self._began)  # its last step is still running
        self._release(sequence, reusable=True)
        self._emit(sequence, sequence.finish(now))

    def _count_time(self, sequence: SequenceState, seconds: float) -> None:
        """Count a step's time by phase; a step that encodes and denoises is split by tokens."""
        scheduled = self._scheduled.get(sequence.request_id)
        if scheduled is None:
            return
        read = scheduled.stop - scheduled.start
        opens = scheduled.is_last and scheduled.phase is not VERIFY
        refines = scheduled.phase is DENOISE or (opens and sequence.refines)
        refined = sequence.canvas_len if refines else 0
        for phase, tokens in ((scheduled.phase.name, read), (DENOISE.name, refined)):
            sequence.phase_s[phase] = sequence.phase_s.get(phase, 0.0) + seconds * tokens / (read + refined)

    def _release(self, sequence: SequenceState, *, reusable: bool) -> None:
        del self._sequences[sequence.request_id]
        self._scheduler.remove(sequence.request_id, reusable=reusable)

    def _emit(self, sequence: SequenceState, event: Event | Failed) -> None:
        self._outputs.append((sequence.request_id, event))

    def _fail(self, sequence: SequenceState, error: Exception) -> None:
        if sequence.request_id in self._sequences:
            self._release(sequence, reusable=False)
        self._emit(sequence, Failed(row=sequence.request.row, error=error))

    def _run_isolated(self, sequence: SequenceState, act: Callable[..., Result], *args: Any) -> Result | None:
        """The result of `act`; if it fails, only `sequence` fails, and no event of `act` is emitted."""
        outputs = len(self._outputs)
        try:
            self._fault(act.__name__, [sequence.request_id])
            found = act(*args)
            self._fault(f"{act.__name__}_done", [sequence.request_id])
            return found
        except RankError:
            raise
        except Exception as error:
            del self._outputs[outputs:]
            self._fail(sequence, error)
            return None


def _canvas_params(params: GenerationParams, decode: str) -> GenerationParams:
    """Options of a canvas, which is only a draft if the causal pass verifies it."""
    if decode in ("verified", "lossless", "auto"):
        return replace(params, max_denoising_steps=params.draft_steps)
    return params


def _group_by(items: Sequence[Item], key: Callable[[Item], Hashable]) -> Iterator[list[Item]]:
    """Items with the same key, in the order in which keys first appear."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return iter(groups.values())
