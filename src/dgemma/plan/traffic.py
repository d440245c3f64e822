"""Who asks what, and when: conversations that begin at random times, on prompts that begin alike."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from dgemma.errors import InputError

_DAY_S = 86_400.0
_MOST_SPREAD = 10.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """rate: requests per second on average, in a Poisson process of conversations.

    prompt, answer: tokens on average. spread: of their lengths, the sigma of a lognormal distribution; 0: all
      alike.
    shared: of the prompt's tokens, those of a system prompt that is one of `system_prompts`, chosen by Zipf's
      law with exponent `zipf`.
    turns: requests of a conversation; each has the context before it, and comes `think_s` after the answer.
    daily: how far the rate goes up and down in a day, as a share of itself.
    """

    rate: float
    prompt: int = 1000
    answer: int = 256
    spread: float = 0.5
    shared: int = 0
    system_prompts: int = 100
    zipf: float = 1.0
    turns: int = 1
    think_s: float = 20.0
    daily: float = 0.0

    def check(self) -> None:
        for name, least in (("prompt", 1), ("answer", 1), ("turns", 1), ("system_prompts", 1)):
            if getattr(self, name) < least:
                raise InputError.about(name, f"is {getattr(self, name)}; it must be at least {least}.")
        if not 0 < self.rate < math.inf:
            raise InputError.about("rate", f"is {self.rate}; it must be more than 0.")
        if not 0 <= self.spread <= _MOST_SPREAD:
            raise InputError.about("spread", f"is {self.spread}; it must be from 0 to {_MOST_SPREAD:g}.")
        if not 0 <= self.shared < self.prompt:
            raise InputError.about("shared", f"is {self.shared}; it must be less than the prompt's tokens.")
        if not 0 <= self.daily < 1:
            raise InputError.about("daily", f"is {self.daily}; it must be from 0 to less than 1.")

    def rate_at(self, at: float) -> float:
        """Lowest at 0, highest half a day later."""
        return self.rate * (1 - self.daily * math.cos(2 * math.pi * at / _DAY_S))


@dataclass(slots=True)
class Dialogue:
    """What was said so far. Tokens are numbers that differ where texts would."""

    number: int
    context: list[int]
    turns_left: int


@dataclass(slots=True)
class TrafficRequest:
    """Its prompt, and what the model will write."""

    conversation: Dialogue
    tokens: list[int]
    length: int
    arrived: float
    steps: list[int] = field(default_factory=list)  # of each canvas
    attempts: int = 0
    first_text_at: float | None = None
    cached: int = 0  # tokens of the prompt that were not computed


class Arrivals:
    """Conversations in the order of their beginnings, and their next turns. The same for the same seed."""

    def __init__(self, traffic: Traffic, seed: int = 0) -> None:
        self._traffic = traffic
        self._random = random.Random(seed)  # noqa: S311
        self._weights = list(
            accumulate((rank + 1) ** -traffic.zipf for rank in range(traffic.system_prompts))
        )
        self._count = 0

    def beginnings(self) -> Iterator[TrafficRequest]:
        """The first request of each conversation, without end."""
        traffic, at = self._traffic, 0.0
        most = traffic.rate * (1 + traffic.daily) / traffic.turns
        while True:
            at += self._random.expovariate(most)
            if self._random.random() * most * traffic.turns > traffic.rate_at(at):
                continue  # thinned: the rate varies, and this moment has less
            self._count += 1
            prompts = range(traffic.system_prompts)
            (rank,) = self._random.choices(prompts, cum_weights=self._weights)
            told = Dialogue(self._count, [-1 - rank] * traffic.shared, traffic.turns - 1)
            yield self._request(told, at)

    def next_turn(self, before: TrafficRequest, at: float) -> TrafficRequest | None:
        """What follows an answer that came at `at`; None: it was the last."""
        told = before.conversation
        if not told.turns_left:
            return None
        told.turns_left -= 1
        told.context.extend([told.number] * before.length)
        return self._request(told, at + self._random.expovariate(1 / self._traffic.think_s))

    def _request(self, told: Dialogue, at: float) -> TrafficRequest:
        told.context.extend([told.number] * self._length(self._traffic.prompt - self._traffic.shared))
        return TrafficRequest(told, list(told.context), self._length(self._traffic.answer), at)

    def _length(self, mean: int) -> int:
        sigma = self._traffic.spread
        if not sigma:
            return mean
        return max(1, round(self._random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def canvases_of(length: int, canvas_len: int, steps: Sequence[int], rng: random.Random) -> list[int]:
    """The steps of each canvas of an answer, drawn from those that were seen."""
    return rng.choices(steps, k=-(-length // canvas_len))
