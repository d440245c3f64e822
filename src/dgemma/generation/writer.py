"""One row's answer as it grows: tokens in, final text out, and when it is finished."""

from __future__ import annotations

from collections.abc import Container, Sequence

from dgemma.events import Answer, Commit, Draft, FinishReason, LogProbs, Timings, ToolCall
from dgemma.given import Given
from dgemma.params import GenerationParams
from dgemma.text.reply import Channel, ReplyParser, ReplyPiece
from dgemma.text.stop_strings import StopStrings
from dgemma.text.tokenizer import Tokenizer


class AnswerWriter:
    """Judges end tokens, stop strings and length, once, when tokens are committed."""

    def __init__(
        self,
        *,
        row: int,
        seed: int,
        max_tokens: int,
        params: GenerationParams,
        tokenizer: Tokenizer | None,
        given: Given | None = None,
        whole_after: Container[int] = (),
    ) -> None:
        """whole_after: words behind which a text of max_tokens is whole, not cut off."""
        self.row = row
        self.seed = seed
        self.reason: FinishReason | None = None
        self.tokens: list[int] = []
        self.steps: list[int] = []
        self.provisional_tokens = 0
        self.scores: list[float] = []
        self.canvas = 0  # number of the next one
        self._given = given
        self._whole_after = whole_after
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
    ) -> Commit:
        """Take a canvas (or one causal token), up to where the answer ends.

        settled: False for the best guess of a canvas that ran out of time. is_late: no more will come.
        watched: what was asked of positions of this canvas.
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
                self.reason = FinishReason.STOP if token in self._whole_after else FinishReason.LENGTH
                break
        self._watched += [(begin + position, words) for position, words in watched]
        if not settled:
            self.provisional_tokens = len(self.tokens) - begin
        if not settled or (is_late and self.reason is None):
            self.reason = FinishReason.DEADLINE
        if self.reason is not None:
            self._flush(texts, thoughts)
        new = tuple(self.tokens[begin:])
        words = None if self._logprobs is None or logprobs is None else tuple(logprobs[: len(new)])
        if self._logprobs is not None and words is not None:
            self._logprobs += words
        pinned = self._pinned(begin, len(new))
        if steps or (new and len(pinned) == len(new)):  # a canvas that is fixed as a whole takes no step
            self.steps.append(steps)
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
            logprobs=words,
            settled=settled,
            pinned=pinned,
        )

    def end(self) -> None:
        """Nothing was to be written."""
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
            pinned=self._pinned(len(self.tokens), end),
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
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            provisional_tokens=self.provisional_tokens,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            pinned=self._pinned(0, len(self.tokens)),
            watched=tuple(self._watched),
            scores=tuple(self.scores),
            timings=timings,
        )

    def _pinned(self, begin: int, count: int) -> tuple[int, ...]:
        """Which of `count` positions behind `begin` are fixed, counted from there."""
        if self._given is None or not self._given.fixed:
            return ()
        return tuple(at for at in range(count) if begin + at in self._given.fixed)

    def _flush(self, texts: list[str], thoughts: list[str]) -> None:
        """Release what was held back for a character, a marker or a stop string to become whole."""
        if self._stops.stopped is None and self._parser is not None:
            self._take(self._parser.finish(), texts, thoughts)
            texts.append(self._stops.finish())

    def _take(self, pieces: Sequence[ReplyPiece], texts: list[str], thoughts: list[str]) -> None:
        for piece in pieces:
            if piece.channel is Channel.ANSWER:
                texts.append(self._stops.add(piece.text))
            elif piece.channel is Channel.THOUGHT:
                thoughts.append(piece.text)
            elif piece.call is not None:
                self._tool_calls.append(piece.call)
