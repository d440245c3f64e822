"""An engine and a text without a model: what they say is a function of the request alone."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dgemma.engine.request import EngineRequest, PinnedTokens, resolve_canvas_len
from dgemma.engine.service import (
    Accepted,
    BusyError,
    DrainingError,
    EngineEvent,
    EngineFailureError,
    EngineStats,
    ServedModel,
)
from dgemma.events import (
    Answer,
    Commit,
    Draft,
    Finish,
    FinishReason,
    PromptScored,
    ScoredToken,
    ToolCall,
)
from dgemma.images.preprocess import ImageSettings
from dgemma.images.prompt import ImagePrompt
from dgemma.params import GenerationParams
from dgemma.server.text import TokenText
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.tasks.context import TaskContext
from dgemma.text.json_value import JsonReader
from dgemma.text.messages import read_messages, read_tools
from dgemma.text.stop_strings import StopStrings
from dgemma.text.token_texts import TokenTexts
from text.bundled import TEMPLATE, TOKENIZER

# Tokens below 256 are bytes; above them stand the controls.
BOS, TURN, END, THINK, TOOL = range(256, 261)
CONTROLS = {BOS: "<bos>", TURN: "<|turn>", END: "<turn|>", THINK: "<|think|>", TOOL: "<|tool>"}
VOCAB_SIZE = 261
CANVAS_LEN = 16
TOKEN_TEXTS = TokenTexts(TOKENIZER)
WORDS = tuple(id_ for id_ in range(TOKENIZER.vocab_size) if TOKEN_TEXTS.text_of(id_))


class FakeText:
    """Bytes as tokens; messages and tools are checked by the real rules."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
    ) -> ImagePrompt:
        reader = JsonReader()
        chat = read_messages(messages, reader, for_reply=True)
        ids = [BOS, *([THINK] if thinking else [])]
        for tool in read_tools(tools, reader) or []:
            ids += [TOOL, *tool["function"]["name"].encode()]
        for message in chat:
            ids += [TURN, *f"{message['role']}\n{message['content']}".encode(), END]
        return ImagePrompt((*ids, TURN))

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return (BOS, *self.encode_text(text))

    def encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(JsonReader().text(text, "text").encode())

    def decode(self, tokens: Sequence[int]) -> str:
        raw = b"".join(CONTROLS[token].encode() if token in CONTROLS else bytes([token]) for token in tokens)
        return raw.decode(errors="replace")

    def token_text(self, token: int) -> TokenText:
        if token in CONTROLS:
            return TokenText(text=CONTROLS[token], raw=None)
        raw = bytes([token])
        return TokenText(text=raw.decode(errors="replace"), raw=raw)

    def compiler(self, served: ServedModel) -> GrammarCompiler:
        """On the bundled tokenizer, too: bytes have no tool calls."""
        return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, (TOKENIZER.controls["<eos>"],))

    def task_context(
        self, served: ServedModel, *, params: GenerationParams, seed: int, adapter: str | None, id_: str
    ) -> TaskContext:
        """On the bundled tokenizer: work on canvases is more than bytes."""
        return TaskContext(
            tokenizer=TOKENIZER,
            template=TEMPLATE,
            token_texts=TOKEN_TEXTS,
            canvas_len=resolve_canvas_len(served.canvas_len, params.canvas_len),
            max_positions=served.max_positions,
            vocab_size=served.vocab_size,
            params=params,
            seed=seed,
            adapter=adapter,
            id=id_,
        )


@dataclass(frozen=True, kw_only=True)
class Script:
    """What an answer shall be, and what shall happen on the way."""

    text: str = ""
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    steps: int = 3  # per canvas
    turns: int = 0  # of the event loop between two events: how others come in between
    delay_s: float = 0.0  # before each commit
    until: Callable[[], object] | None = None  # before each commit it waits for this to hold
    accepts: bool = True  # False: says nothing at all
    holds_at: int | None = None  # waits before this commit, until its deadline or for ever
    fails_at: int | None = None  # raises before this commit
    error: Exception = field(default_factory=lambda: EngineFailureError("a step failed on secret words"))
    plain_commits: bool = False  # calls and log-probabilities in the Finish alone
    ends_early: bool = False  # without a Finish, which no engine should do
    cached_tokens: int = 0


def answer_text(seed: int, prompt: Sequence[int]) -> str:
    """The text that belongs to this seed and prompt, and to no other."""
    digest = hashlib.sha256(f"{seed} {list(prompt)}".encode()).hexdigest()
    return f"Seed {seed} § {digest[:16]} äöü € " + " ".join(digest[i : i + 4] for i in range(16, 48, 4))


def by_seed(request: EngineRequest) -> Script:
    return Script(text=answer_text(request.seed, request.prompt), turns=request.seed % 7)


def worked(request: EngineRequest, script: Script) -> Answer:
    """The answer to a part of a fill, an edit or a decision: as likely as a hash of it all would have it."""
    given, start = request.pinned or PinnedTokens(), request.score_from

    asked = hashlib.sha256(f"{request.seed} {request.prompt} {request.adapter}".encode())

    def drawn(*what: object) -> int:
        found = asked.copy()
        found.update(repr(what).encode())
        return int.from_bytes(found.digest()[:4], "big")

    def log_prob(*what: object) -> float:
        return -0.1 - drawn(*what) % 997 / 100

    if start is not None:
        return Answer(
            text="",
            tokens=(),
            finish_reason=FinishReason.STOP,
            seed=request.seed,
            decode="score",
            cached_tokens=script.cached_tokens,
            scores=tuple(log_prob(at) for at in range(start, len(request.prompt))),
            prompt_logprobs=scored(request),
        )
    count = request.params.logprobs
    tokens: list[int] = []
    for at in range(request.params.max_tokens or 0):
        words = (given.fixed[at],) if at in given.fixed else given.among.get(at, WORDS)
        tokens.append(words[drawn(at) % len(words)])
    return Answer(
        text=TOKENIZER.decode(tokens),
        tokens=tuple(tokens),
        finish_reason=FinishReason.LENGTH,
        seed=request.seed,
        decode=request.params.decode,
        steps=() if is_draft(request) else (script.steps,),
        causal_tokens=len(tokens) if is_draft(request) else 0,
        cached_tokens=script.cached_tokens,
        logprobs=tuple(
            tuple((WORDS[(token + rank) % len(WORDS)], log_prob(at) - rank) for rank in range(count))
            for at, token in enumerate(tokens)
        )
        if count
        else None,
        watched=tuple(
            (at, tuple((word, log_prob(at, word)) for word in words)) for at, words in given.watch.items()
        ),
    )


def scored(request: EngineRequest) -> tuple[ScoredToken, ...] | None:
    """Each token of the prompt the second likeliest, after the one with the next id."""
    if request.prompt_logprobs is None:
        return None
    return tuple(
        ScoredToken(
            token,
            -0.5,
            2,
            tuple([((token + 1) % VOCAB_SIZE, -0.25), (token, -0.5), (0, -4.0)][: request.prompt_logprobs]),
        )
        for token in request.prompt[1:]
    )


def is_draft(request: EngineRequest) -> bool:
    """Whether it is the left-to-right part of a fill."""
    return request.params.decode == "causal" and request.params.ignore_end


class FakeEngine:
    """Writes what its script says, in canvases of sixteen bytes."""

    def __init__(
        self,
        script: Callable[[EngineRequest], Script] | Script = by_seed,
        *,
        adapters: tuple[str, ...] = (),
        max_positions: int = 4096,
        image_settings: ImageSettings | None = None,
    ) -> None:
        self._script = script
        self._streams: list[AsyncGenerator[EngineEvent, None]] = []
        self.requests: list[EngineRequest] = []
        self.cancelled: list[str] = []
        self.finished: list[str] = []
        self.running = 0
        self.most_running = 0
        self.busy_for_s: float | None = None
        self.busy_after: int | None = None  # so many requests are taken, then none
        self.is_draining = False
        self.failure: str | None = None
        self._model = ServedModel(
            max_positions=max_positions,
            canvas_len=CANVAS_LEN,
            vocab_size=VOCAB_SIZE,
            defaults=GenerationParams(end_tokens=(END,)),
            adapters=adapters,
            image_settings=image_settings,
            fingerprint="fake-1",
        )

    @property
    def model(self) -> ServedModel:
        return self._model

    async def fresh_stats(self) -> EngineStats:
        return self.stats()

    def stats(self) -> EngineStats:
        return EngineStats(
            slots_used=self.running,
            slots_total=8,
            full_blocks_used=3,
            full_blocks_total=64,
            window_blocks_used=2,
            window_blocks_total=16,
            prefix_hit_tokens=40,
            counters={"denoise_forwards": 12},
            failure=self.failure,
        )

    async def drain(self, timeout_s: float) -> None:
        self.is_draining = True

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        # Kept, so that only who closes it ends it: Python would close a forgotten one by itself.
        self._streams.append(self._events(request))
        return self._streams[-1]

    async def _events(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.requests.append(request)
        if self.is_draining:
            raise DrainingError("draining")
        if self.busy_for_s is not None or len(self.requests) > (self.busy_after or len(self.requests)):
            raise BusyError("the queue is full", retry_after_s=self.busy_for_s or 0.2)
        script = self._script if isinstance(self._script, Script) else self._script(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        writer = _Writer(request, script)
        is_finished = False
        is_work = request.pinned is not None or request.score_from is not None or is_draft(request)
        try:
            if not script.accepts:
                await asyncio.sleep(3600)
            yield Accepted()
            if (prompt := scored(request)) is not None:
                yield PromptScored(row=0, logprobs=prompt)
            if is_work and script.fails_at is not None:
                raise script.error
            is_late = is_work and script.holds_at is not None and await _held(request.params.deadline_s)
            if is_work:
                await asyncio.sleep(script.delay_s)
                await _turn(script.turns)
                answer = worked(request, script)
                is_finished = True
                late = replace(answer, finish_reason=FinishReason.DEADLINE)
                yield Finish(row=0, answer=late if is_late else answer)
                return
            for canvas in writer.canvases():
                for draft in writer.drafts(canvas) if request.drafts else ():
                    await _turn(script.turns)
                    yield draft
                if script.fails_at == writer.num_canvases:
                    raise script.error
                if script.holds_at == writer.num_canvases and await _held(request.params.deadline_s):
                    break
                await asyncio.sleep(script.delay_s)
                while script.until is not None and not script.until():
                    await asyncio.sleep(0.005)
                await _turn(script.turns)
                yield writer.commit(canvas)
            if not script.ends_early:
                is_finished = True
                yield Finish(row=0, answer=writer.answer())
        finally:
            self.running -= 1
            (self.finished if is_finished else self.cancelled).append(request.id)


class _Writer:
    def __init__(self, request: EngineRequest, script: Script) -> None:
        self._request, self._script = request, script
        self._tokens = (*script.text.encode(), END)[: request.params.max_tokens]
        self._written: list[int] = []
        self._texts: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(request.params.stop)
        self.num_canvases = 0

    def canvases(self) -> Iterator[tuple[int, ...]]:
        found = [self._tokens[at : at + CANVAS_LEN] for at in range(0, len(self._tokens), CANVAS_LEN)]
        for canvas in found:
            if self._stops.stopped is not None:
                return
            yield canvas

    def drafts(self, canvas: tuple[int, ...]) -> list[Draft]:
        text = bytes(token for token in canvas if token < 256).decode(errors="replace")
        return [
            Draft(
                row=0,
                canvas=self.num_canvases,
                step=step,
                tokens=canvas,
                entropy=(1.0 / step,) * len(canvas),
                text=text[:step] + "?" * (len(text) - step),
            )
            for step in range(1, self._script.steps + 1)
        ]

    def commit(self, canvas: tuple[int, ...]) -> Commit:
        is_last = len(self._written) + len(canvas) == len(self._tokens)
        raw = bytes(token for token in canvas if token < 256)
        text = self._stops.add(self._decoder.decode(raw, final=is_last))
        if is_last:
            text += self._stops.finish()
        self._written += canvas
        self._texts.append(text)
        facts = {
            "row": 0,
            "canvas": self.num_canvases,
            "tokens": canvas,
            "steps": self._script.steps,
            "text": text,
            "thought": self._script.thought if self.num_canvases == 0 else "",
        }
        self.num_canvases += 1
        if self._script.plain_commits:
            return Commit(**facts)
        return Commit(
            **facts,
            logprobs=self._logprobs(canvas),
            tool_calls=self._script.tool_calls if is_last else (),
        )

    def answer(self) -> Answer:
        is_whole = len(self._written) == len(self._tokens)
        ended = self._stops.stopped is not None or (is_whole and self._written[-1:] == [END])
        reason = FinishReason.STOP if ended else FinishReason.LENGTH if is_whole else FinishReason.DEADLINE
        return Answer(
            text="".join(self._texts),
            tokens=tuple(self._written),
            finish_reason=reason,
            seed=self._request.seed,
            decode="diffuse",
            thought=self._script.thought,
            tool_calls=self._script.tool_calls,
            stop_string=self._stops.stopped,
            steps=(self._script.steps,) * self.num_canvases,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._script.cached_tokens,
            logprobs=self._logprobs(self._written),
            prompt_logprobs=scored(self._request),
        )

    def _logprobs(self, tokens: Sequence[int]) -> tuple[tuple[tuple[int, float], ...], ...] | None:
        count = self._request.params.logprobs
        if not count:
            return None
        return tuple(
            tuple(((token + rank) % VOCAB_SIZE, -0.1 - rank) for rank in range(count)) for token in tokens
        )


async def _held(deadline_s: float | None) -> bool:
    """Waits until the deadline, if it comes soon enough for a test; else until somebody gives up."""
    await asyncio.sleep(deadline_s if deadline_s is not None and deadline_s < 5 else 3600)
    return True


async def _turn(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
