"""The output of one sequence as it grows: committed tokens to text, and the finish reason."""

from __future__ import annotations

from collections.abc import Container, Sequence

from dgemma.engine.request import PinnedTokens
from dgemma.events import Answer, Commit, Draft, FinishReason, LogProbs, ScoredToken, Timings, ToolCall
from dgemma.params import GenerationParams
from dgemma.text.reply import Channel, ReplyChunk, ReplyParser
from dgemma.text.stop_strings import StopStrings
from dgemma.text.tokenizer import Tokenizer


class OutputBuilder:
    """Checks end tokens, stop strings and length once, when tokens are committed."""

    def __init__(
        self,
        *,
        row: int,
        seed: int,
        max_tokens: int,
        params: GenerationParams,
        tokenizer: Tokenizer | None,
        pinned: PinnedTokens | None = None,
        complete_after: Container[int] = (),
        scores_prompt: bool = False,
    ) -> None:
        """complete_after: tokens after which an answer of max_tokens is complete, not cut off.
        scores_prompt: it also has the log-probabilities of its prompt."""
        self.row = row
        self.seed = seed
        self.reason: FinishReason | None = None
        self.tokens: list[int] = []
        self.steps: list[int] = []
        self._accepted: list[int] = []
        self._causal_tokens = 0
        self.provisional_tokens = 0
        self.scores: list[float] = []
        self.prompt_logprobs: list[ScoredToken] | None = [] if scores_prompt else None
        self.canvas = 0  # number of the next one
        self._pinned = pinned
        self._complete_after = complete_after
        self._watched: list[tuple[int, LogProbs]] = []
        self.max_tokens = max_tokens
        self._end_tokens = frozenset(() if params.ignore_end else params.end_tokens)
        self._tokenizer = tokenizer
        self._parser = None if tokenizer is None else ReplyParser(tokenizer)
        self._stops = StopStrings(params.stop)
        self._text: list[str] = []
        self._thought: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._logprobs: list[LogProbs] | None = [] if params.logprobs else None

    def commit(
        self,
        tokens: Sequence[int],
        *,
        steps: int,
        settled: bool = True,
        is_late: bool = False,
        logprobs: Sequence[LogProbs] | None = None,
        watched: Sequence[tuple[int, LogProbs]] = (),
        accepted: int | None = None,
    ) -> Commit:
        """Take a canvas (or one causal token), up to where the answer ends.

        settled: False for the best guess of a canvas that ran out of time. is_late: no more will come.
        watched: log-probabilities of watched positions of this canvas. accepted: tokens of a draft that was
        verified.
        """
        texts: list[str] = []
        thoughts: list[str] = []
        begin, calls = len(self.tokens), len(self._tool_calls)
        for token in tokens:
            self.tokens.append(token)
            if token in self._end_tokens:
                self.reason = FinishReason.STOP
                break
            self._take([] if self._parser is None else self._parser.add([token]), texts, thoughts)
            if self._stops.stopped is not None:
                self.reason = FinishReason.STOP
                break
            if len(self.tokens) == self.max_tokens:
                self.reason = FinishReason.STOP if token in self._complete_after else FinishReason.LENGTH
                break
        self._watched += [(begin + position, top) for position, top in watched]
        if not settled:
            self.provisional_tokens = len(self.tokens) - begin
        if not settled or (is_late and self.reason is None):
            self.reason = FinishReason.DEADLINE
        if self.reason is not None:
            self._flush(texts, thoughts)
        new = tuple(self.tokens[begin:])
        top = None if self._logprobs is None or logprobs is None else tuple(logprobs[: len(new)])
        if self._logprobs is not None and top is not None:
            self._logprobs += top
        pinned = self._pinned_positions(begin, len(new))
        if steps or (new and len(pinned) == len(new)):  # a canvas whose positions are all fixed takes no step
            self.steps.append(steps)
        else:
            self._causal_tokens += len(new)
        if accepted is not None:
            accepted = min(accepted, len(new))
            self._accepted.append(accepted)
        self._text += texts
        self._thought += thoughts
        self.canvas += 1
        return Commit(
            row=self.row,
            canvas=self.canvas - 1,
            tokens=new,
            steps=steps,
            text="".join(texts),
            thought="".join(thoughts),
            tool_calls=tuple(self._tool_calls[calls:]),
            logprobs=top,
            settled=settled,
            pinned=pinned,
            accepted=accepted,
        )

    def end(self) -> None:
        """Finish an answer without tokens, as of a request that only scores."""
        self.reason = FinishReason.STOP

    def draft(self, guess: Sequence[int], entropy: Sequence[float], step: int) -> Draft:
        """The running canvas as it stands, up to its end token."""
        end = next((i + 1 for i, token in enumerate(guess) if token in self._end_tokens), len(guess))
        return Draft(
            row=self.row,
            canvas=self.canvas,
            step=step,
            tokens=tuple(guess[:end]),
            entropy=tuple(entropy[:end]),
            text="" if self._tokenizer is None else self._tokenizer.decode(guess[:end]),
            pinned=self._pinned_positions(len(self.tokens), end),
        )

    def answer(self, *, decode: str, timings: Timings, prompt_tokens: int, cached_tokens: int) -> Answer:
        assert self.reason is not None
        return Answer(
            text="".join(self._text),
            tokens=tuple(self.tokens),
            finish_reason=self.reason,
            seed=self.seed,
            decode=decode,
            thought="".join(self._thought),
            tool_calls=tuple(self._tool_calls),
            stop_string=self._stops.stopped,
            steps=tuple(self.steps),
            accepted=tuple(self._accepted),
            causal_tokens=self._causal_tokens,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            provisional_tokens=self.provisional_tokens,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            pinned=self._pinned_positions(0, len(self.tokens)),
            watched=tuple(self._watched),
            scores=tuple(self.scores),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            timings=timings,
        )

    def _pinned_positions(self, begin: int, count: int) -> tuple[int, ...]:
        """The fixed positions among `count` from `begin` on, relative to `begin`."""
        if self._pinned is None or not self._pinned.fixed:
            return ()
        return tuple(at for at in range(count) if begin + at in self._pinned.fixed)

    def _flush(self, texts: list[str], thoughts: list[str]) -> None:
        """Release what was held back for a character, a marker or a stop string to become whole."""
        if self._stops.stopped is None and self._parser is not None:
            self._take(self._parser.finish(), texts, thoughts)
            texts.append(self._stops.finish())

    def _take(self, chunks: Sequence[ReplyChunk], texts: list[str], thoughts: list[str]) -> None:
        for chunk in chunks:
            if chunk.channel is Channel.ANSWER:
                texts.append(self._stops.add(chunk.text))
            elif chunk.channel is Channel.THOUGHT:
                thoughts.append(chunk.text)
            elif chunk.call is not None:
                self._tool_calls.append(chunk.call)
