"""A template on a canvas, and slots in it that are read as probabilities.

A slot holds one of several labels, each a sequence of tokens. Where labels differ, the position is restricted
to their next tokens: that gives the probability of each branch, as a decoder constrained to the labels would
have it. The probabilities of several canvases of noise are averaged. More steps make the slots of a template
agree with each other; they also make a slot agree with its own first sample, so a single slot is read after
one step. Labels of one token differ at once, so the usual question takes one round. The order of labels
changes nothing: they are sorted first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dgemma.engine.request import PinnedTokens
from dgemma.errors import InputError
from dgemma.events import Answer
from dgemma.tasks.context import Ids, TaskContext
from dgemma.tasks.rounds import Rounds

# A branch that is less likely than this is not followed: its labels share its probability.
_FOLLOWED = 1e-6
# Stands for what follows a slot directly before another slot: no token is needed.
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
    def next_tokens(self) -> Ids:
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
    task: TaskContext, prompt: Ids, parts: Sequence[Part], *, steps: int, draws: int = 1
) -> Rounds[SlotReadings]:
    """The probability of each label of each slot, after `prompt`, after at most `steps` steps.

    draws: canvases of different noise whose probabilities are averaged.
    """
    for name, value in (("steps", steps), ("draws", draws)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise InputError(f"{name} is {value!r}; it must be a whole number from 1 to {_MOST}.")
    slots = [at for at, part in enumerate(parts) if isinstance(part, Slot)]
    if template_len(parts) > task.canvas_len:
        raise InputError(
            f"the template has up to {template_len(parts)} tokens; "
            f"a canvas has {task.canvas_len}. Shorten it."
        )
    task = task.sized(template_len(parts))
    # A label that another one begins with is distinguished by the token after the slot.
    follow = {at: _follower(parts, at, task.end_token) for at in slots}
    leaves: dict[int, dict[Ids, float]] = {at: {} for at in slots}
    open_ones = [_Branch(at, _extended(parts[at], follow[at]), 0.0) for at in slots]
    for branch in open_ones:
        if any(longer[: len(label)] == label for label, longer in pairwise(branch.labels)):
            raise InputError("one label goes on as the template does after another; give them other texts.")
    best: dict[int, Ids] = {}
    answers: list[Answer] = []
    is_first = True
    while open_ones:
        # All slots together at first; then each branch on a canvas of its own, the other slots at their best.
        groups = [open_ones] if is_first else [[branch] for branch in open_ones]
        layouts = [_layout(task, parts, group, best) for group in groups]
        found = yield [
            task.write(
                prompt,
                max_tokens=task.canvas_len,
                pinned=pinned,
                seed=task.seed + number,
                max_denoising_steps=steps,
                temperature=0.0,
            )
            for pinned, _ in layouts
            for number in range(draws)
        ]
        answers += found
        open_ones = []
        for at, (group, (_, places)) in enumerate(zip(groups, layouts, strict=True)):
            watched = [dict(answer.watched) for answer in found[at * draws : (at + 1) * draws]]
            for branch in group:
                opinions = [dict(one[places[branch.slot]]) for one in watched]
                open_ones += _follow(branch, _mean(opinions), leaves[branch.slot])
        best = {at: _most_likely(leaves[at], [b for b in open_ones if b.slot == at]) for at in slots}
        is_first = False
    return SlotReadings(
        probabilities=tuple(_shares(parts[at], follow[at], leaves[at]) for at in slots),
        answers=tuple(answers),
    )


def _extended(part: Part, follower: int) -> tuple[Ids, ...]:
    assert isinstance(part, Slot)
    return tuple(sorted((*label, follower) for label in part.labels))


def _follower(parts: Sequence[Part], at: int, end_token: int) -> int:
    after = parts[at + 1] if at + 1 < len(parts) else ()
    if not isinstance(after, Slot):
        return after[0] if after else end_token
    part = parts[at]
    assert isinstance(part, Slot)
    ordered = sorted(part.labels)
    if any(longer[: len(label)] == label for label, longer in pairwise(ordered)):
        raise InputError(
            "two slots stand side by side, and one label begins with another: where would it end?"
        )
    return _NOTHING


def _layout(
    task: TaskContext, parts: Sequence[Part], branches: Sequence[_Branch], best: dict[int, Ids]
) -> tuple[PinnedTokens, dict[int, int]]:
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
            among[places[number]] = branch.next_tokens
            # As long as the shortest label: the rest of it is open, found with the others. Where that label
            # ends at the parting, the text after the slot stands there as one of the branches.
            at += min(map(len, branch.labels)) - 1
            continue
        tokens = best[number] if isinstance(part, Slot) else part
        for offset, token in enumerate(tokens):
            fixed[at + offset] = token
        at += len(tokens)
    for position in range(at, task.canvas_len):
        fixed[position] = task.end_token
    for position in among:
        fixed.pop(position, None)
    watch = {position: among[position] for position in places.values()}
    return PinnedTokens(fixed=fixed, among=among, watch=watch), places


def _mean(opinions: Sequence[dict[int, float]]) -> dict[int, float]:
    """The logarithm of the mean probability of each token."""
    found: dict[int, float] = {}
    for token in opinions[0]:
        share = math.fsum(math.exp(one[token]) for one in opinions) / len(opinions)
        found[token] = math.log(max(share, _TINY))
    return found


def _follow(branch: _Branch, log_probs: dict[int, float], leaves: dict[Ids, float]) -> list[_Branch]:
    """Where a branch leads: labels that are decided, and branches that part again."""
    more: list[_Branch] = []
    depth = len(branch.shared)
    for token in branch.next_tokens:
        labels = tuple(label for label in branch.labels if label[depth] == token)
        log_prob = branch.log_prob + log_probs[token]
        if len(labels) == 1 or log_prob < math.log(_FOLLOWED):
            for label in labels:
                leaves[label] = log_prob - math.log(len(labels))
        else:
            more.append(_Branch(branch.slot, labels, log_prob))
    return more


def _most_likely(leaves: dict[Ids, float], branches: Sequence[_Branch]) -> Ids:
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
