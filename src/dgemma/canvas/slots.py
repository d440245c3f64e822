"""A template on a canvas, and slots in it that are read as probabilities.

A slot holds one of several labels, each a string of tokens. Where labels part, the canvas is limited to the
words they go on with, and read: that gives the probability of each branch, as a decoder that may write
nothing else would have it. One canvas of noise is one opinion, so several are read and their probabilities
averaged. More steps let the slots of a template agree with each other; they also let a slot agree with its
own first draw, so a slot that stands alone is read after one. Labels of one token part at once, so the usual
question takes one round. Which order labels come in changes nothing: they are sorted before anything is
computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dgemma.canvas.rounds import Rounds
from dgemma.canvas.workbench import Ids, Workbench
from dgemma.errors import InputError
from dgemma.events import Answer
from dgemma.given import Given

# A branch that is less likely than this is not followed: its labels share its probability.
_FOLLOWED = 1e-6
# What follows a slot that another one follows: no word, and none is needed.
_NOTHING = -1
_TINY = 1e-300
_MOST = 64  # steps, or draws


@dataclass(frozen=True)
class Slot:
    """A place for one of these labels."""

    labels: tuple[Ids, ...]

    def __post_init__(self) -> None:
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < 2 or not all(self.labels):
            raise InputError(
                "a slot needs two labels or more, each of a token or more, no two of them alike."
            )


Part = Ids | Slot


@dataclass
class _Branch:
    """Labels that share their first tokens, and the probability that one of them stands in the slot."""

    slot: int
    labels: tuple[Ids, ...]  # each with what follows the slot
    log_prob: float
    shared: Ids = field(init=False)

    def __post_init__(self) -> None:
        count = 0
        while len({label[: count + 1] for label in self.labels}) == 1 and count < len(self.labels[0]):
            count += 1
        self.shared = self.labels[0][:count]

    @property
    def next_words(self) -> Ids:
        return tuple(sorted({label[len(self.shared)] for label in self.labels}))


@dataclass(frozen=True, kw_only=True)
class SlotReadings:
    """Probabilities of each slot's labels, in the order of the labels."""

    probabilities: tuple[tuple[float, ...], ...]
    answers: tuple[Answer, ...]  # of all canvases that were read

    @property
    def forwards(self) -> int:
        return sum(answer.forwards for answer in self.answers)


def template_len(parts: Sequence[Part]) -> int:
    """The most tokens the template may take."""
    return sum(max(map(len, part.labels)) if isinstance(part, Slot) else len(part) for part in parts)


def read_slots(
    bench: Workbench, prompt: Ids, parts: Sequence[Part], *, steps: int, draws: int = 1
) -> Rounds[SlotReadings]:
    """The probability of each label of each slot, behind `prompt`, after at most `steps` steps.

    draws: canvases of different noise whose probabilities are averaged.
    """
    for name, value in (("steps", steps), ("draws", draws)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise InputError(f"{name} is {value!r}; it must be a whole number from 1 to {_MOST}.")
    slots = [at for at, part in enumerate(parts) if isinstance(part, Slot)]
    if template_len(parts) > bench.canvas_len:
        raise InputError(
            f"the template has up to {template_len(parts)} tokens; "
            f"a canvas has {bench.canvas_len}. Shorten it."
        )
    # A label that another one begins with is told from it by what follows the slot.
    follow = {at: _follower(parts, at, bench.end_token) for at in slots}
    leaves: dict[int, dict[Ids, float]] = {at: {} for at in slots}
    open_ones = [_Branch(at, _extended(parts[at], follow[at]), 0.0) for at in slots]
    for branch in open_ones:
        if any(longer[: len(label)] == label for label, longer in pairwise(branch.labels)):
            raise InputError("one label goes on as the template does behind another; give them other texts.")
    best: dict[int, Ids] = {}
    answers: list[Answer] = []
    is_first = True
    while open_ones:
        # All slots together at first; then each branch on a canvas of its own, the other slots at their best.
        groups = [open_ones] if is_first else [[branch] for branch in open_ones]
        layouts = [_layout(bench, parts, group, best) for group in groups]
        found = yield [
            bench.write(
                prompt,
                max_tokens=bench.canvas_len,
                given=given,
                seed=bench.seed + number,
                max_denoising_steps=steps,
                temperature=0.0,
            )
            for given, _ in layouts
            for number in range(draws)
        ]
        answers += found
        open_ones = []
        for at, (group, (_, places)) in enumerate(zip(groups, layouts, strict=True)):
            told = [dict(answer.watched) for answer in found[at * draws : (at + 1) * draws]]
            for branch in group:
                opinions = [dict(one[places[branch.slot]]) for one in told]
                open_ones += _follow(branch, _mean(opinions), leaves[branch.slot])
        best = {at: _likeliest(leaves[at], [b for b in open_ones if b.slot == at]) for at in slots}
        is_first = False
    return SlotReadings(
        probabilities=tuple(_shares(parts[at], follow[at], leaves[at]) for at in slots),
        answers=tuple(answers),
    )


def _extended(part: Part, follower: int) -> tuple[Ids, ...]:
    assert isinstance(part, Slot)
    return tuple(sorted((*label, follower) for label in part.labels))


def _follower(parts: Sequence[Part], at: int, end_token: int) -> int:
    behind = parts[at + 1] if at + 1 < len(parts) else ()
    if not isinstance(behind, Slot):
        return behind[0] if behind else end_token
    part = parts[at]
    assert isinstance(part, Slot)
    ordered = sorted(part.labels)
    if any(longer[: len(label)] == label for label, longer in pairwise(ordered)):
        raise InputError(
            "two slots stand side by side, and one label begins with another: where would it end?"
        )
    return _NOTHING


def _layout(
    bench: Workbench, parts: Sequence[Part], branches: Sequence[_Branch], best: dict[int, Ids]
) -> tuple[Given, dict[int, int]]:
    """A canvas with these branches open, and where each slot's labels part."""
    by_slot = {branch.slot: branch for branch in branches}
    fixed: dict[int, int] = {}
    among: dict[int, Ids] = {}
    places: dict[int, int] = {}
    at = 0
    for number, part in enumerate(parts):
        if isinstance(part, Slot) and number in by_slot:
            branch = by_slot[number]
            for offset, token in enumerate(branch.shared):
                fixed[at + offset] = token
            places[number] = at + len(branch.shared)
            among[places[number]] = branch.next_words
            # As long as the shortest label: the rest of it is open, found with the others. Where that label
            # ends at the parting, the text behind the slot stands there as one of the branches.
            at += min(map(len, branch.labels)) - 1
            continue
        tokens = best[number] if isinstance(part, Slot) else part
        for offset, token in enumerate(tokens):
            fixed[at + offset] = token
        at += len(tokens)
    for position in range(at, bench.canvas_len):
        fixed[position] = bench.end_token
    for position in among:
        fixed.pop(position, None)
    watch = {position: among[position] for position in places.values()}
    return Given(fixed=fixed, among=among, watch=watch), places


def _mean(opinions: Sequence[dict[int, float]]) -> dict[int, float]:
    """The logarithm of the mean probability of each word."""
    found: dict[int, float] = {}
    for word in opinions[0]:
        share = math.fsum(math.exp(one[word]) for one in opinions) / len(opinions)
        found[word] = math.log(max(share, _TINY))
    return found


def _follow(branch: _Branch, log_probs: dict[int, float], leaves: dict[Ids, float]) -> list[_Branch]:
    """Where a branch leads: labels that are decided, and branches that part again."""
    more: list[_Branch] = []
    depth = len(branch.shared)
    for word in branch.next_words:
        labels = tuple(label for label in branch.labels if label[depth] == word)
        log_prob = branch.log_prob + log_probs[word]
        if len(labels) == 1 or log_prob < math.log(_FOLLOWED):
            for label in labels:
                leaves[label] = log_prob - math.log(len(labels))
        else:
            more.append(_Branch(branch.slot, labels, log_prob))
    return more


def _likeliest(leaves: dict[Ids, float], branches: Sequence[_Branch]) -> Ids:
    """The label to show where another slot is read."""
    known = dict(leaves)
    for branch in branches:
        known[branch.labels[0]] = branch.log_prob
    return max(sorted(known), key=lambda label: known[label])[:-1]


def _shares(part: Part, follower: int, leaves: dict[Ids, float]) -> tuple[float, ...]:
    assert isinstance(part, Slot)
    logs = [leaves[(*label, follower)] for label in part.labels]
    top = max(logs)
    # Summed in an order of their own, so that the order of labels changes no bit.
    total = sum(sorted(math.exp(value - top) for value in logs))
    return tuple(math.exp(value - top) / total for value in logs)
