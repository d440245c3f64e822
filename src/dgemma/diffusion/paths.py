"""Strings of a language over a whole canvas: the best one, draws, and what each position is likely to hold.

A language is a machine whose letters are token classes. At each position each class has a mass under the
step's distribution; positions are independent, but only strings that lead from the first state to an allowed
last one count. Sums over all of them go from the last position to the first (how much can still follow a
state), and draws and marginals from the first to the last. All of it is exact: sampling from the model's
distribution, conditioned on the language.

Positions follow each other, so this is many small sums, in 64 bits, as logarithms: over a canvas two states
may differ by more than any number holds. That is work for numpy, on the CPU, whatever the model runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Shapes: canvas = positions, states, classes; arrows, lanes and bundles as `Machine` has them.

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

NEVER = -np.inf


@dataclass(frozen=True)
class Machine:
    """Arrows in the order of the states they leave.

    Many classes lead from one state to another in many places: those that do so together are a bundle, and
    sums go over bundles.
    """

    arrow_class: Ints  # [arrows]
    arrow_to: Ints  # [arrows]
    begins: Ints  # [states + 1]: a state's arrows begin here
    lane_from: Ints  # [lanes]: pairs of states that arrows join, in order
    lane_to: Ints  # [lanes]
    lane_bundle: Ints  # [lanes]
    bundle_begins: Ints  # [bundles]
    bundle_class: Ints  # [members]: the classes of each bundle, one after another
    num_classes: int

    @property
    def num_states(self) -> int:
        return len(self.begins) - 1


def machine_of(maps: NDArray[np.integer]) -> Machine:
    """From the next state of each class in each state [classes, states], -1 for none."""
    num_classes, num_states = maps.shape
    arrow_from, arrow_class = np.nonzero(maps.T >= 0)
    arrow_to = maps[arrow_class, arrow_from].astype(np.intp)
    lanes, lane_of = np.unique(arrow_from * num_states + arrow_to, return_inverse=True)
    classes = arrow_class[np.argsort(lane_of, kind="stable")]
    bounds = np.append(0, np.cumsum(np.bincount(lane_of, minlength=len(lanes)))).tolist()
    bundles: dict[bytes, int] = {}
    lane_bundle = [
        bundles.setdefault(classes[begin:end].tobytes(), len(bundles)) for begin, end in pairwise(bounds)
    ]
    members = [np.frombuffer(bundle, arrow_class.dtype) for bundle in bundles]
    return Machine(
        arrow_class,
        arrow_to,
        np.searchsorted(arrow_from, np.arange(num_states + 1)),
        lanes // num_states,
        lanes % num_states,
        np.array(lane_bundle, np.intp),
        np.cumsum([0, *map(len, members)])[: len(members)],
        np.concatenate([*members, np.empty(0, np.intp)]).astype(np.intp),
        num_classes,
    )


def what_follows(machine: Machine, masses: Floats, last: Bools) -> Floats:
    """Log of all that can follow each state before each position [canvas + 1, states].

    masses [canvas, classes]: log. last [states]: True where a string may end.
    """
    return _backward(
        machine, _log_sums(masses[:, machine.bundle_class], machine.bundle_begins), last, adds=True
    )


def marginals(machine: Machine, masses: Floats, first: int, follows: Floats) -> Floats:
    """The probability that a position holds a word of each class [canvas, classes], from `what_follows`."""
    members = masses[:, machine.bundle_class]
    bundles = _log_sums(members, machine.bundle_begins)
    held = np.zeros_like(bundles)  # the probability that a position takes an arrow of each bundle
    here = np.zeros(machine.num_states)
    here[first] = 1.0
    for at in range(len(masses)):
        some = np.flatnonzero(here[machine.lane_from])  # lanes of states that can be reached
        source, bundle, to = machine.lane_from[some], machine.lane_bundle[some], machine.lane_to[some]
        shares = np.exp(bundles[at, bundle] + follows[at + 1, to] - follows[at, source]) * here[source]
        held[at] = np.bincount(bundle, shares, held.shape[1])
        here = np.bincount(to, shares, machine.num_states).astype(np.float64, copy=False)
    bundle_of = np.repeat(np.arange(held.shape[1]), np.diff(machine.bundle_begins, append=members.shape[1]))
    own = held[:, bundle_of] * np.exp(members - np.where(bundles > NEVER, bundles, 0.0)[:, bundle_of])
    found = np.zeros_like(masses)
    for number, letter in enumerate(machine.bundle_class):
        found[:, letter] += own[:, number]
    return found


def draw(machine: Machine, masses: Floats, first: int, follows: Floats, clocks: Floats) -> Ints:
    """The classes of one string of the language [canvas], with its probability under the language.

    clocks [canvas, classes]: log of a unit exponential for each; of the arrows that leave a state the first
    to finish is taken.
    """
    return _walk(machine, masses - clocks, first, follows)


def best(machine: Machine, tops: Floats, first: int, last: Bools) -> Ints:
    """The classes of the likeliest string [canvas]; tops [canvas, classes]: log of each class's best word."""
    members = tops[:, machine.bundle_class]
    bundles = np.maximum.reduceat(members, machine.bundle_begins, axis=1) if members.size else members
    return _walk(machine, tops, first, _backward(machine, bundles, last, adds=False))


def _walk(machine: Machine, values: Floats, first: int, follows: Floats) -> Ints:
    """From the first state, always the best arrow together with what follows it."""
    state = first
    chosen = np.empty(len(values), np.intp)
    for at in range(len(values)):
        own = slice(machine.begins[state], machine.begins[state + 1])
        letters, to = machine.arrow_class[own], machine.arrow_to[own]
        arrow = np.argmax(values[at, letters] + follows[at + 1, to])
        chosen[at], state = letters[arrow], to[arrow]
    return chosen


def _backward(machine: Machine, bundles: Floats, last: Bools, *, adds: bool) -> Floats:
    """What can follow each state [canvas + 1, states]: the sum over its arrows, or the best of them."""
    follows = np.full((len(bundles) + 1, machine.num_states), NEVER)
    follows[-1] = np.where(last, 0.0, NEVER)
    # A state without arrows leads nowhere; `reduceat` knows no empty groups.
    busy, begins = np.unique(machine.lane_from, return_index=True)
    for at in range(len(bundles) - 1, -1, -1) if len(busy) else ():
        ways = bundles[at, machine.lane_bundle] + follows[at + 1, machine.lane_to]
        follows[at, busy] = _log_sums(ways, begins) if adds else np.maximum.reduceat(ways, begins)
    return follows


def _log_sums(values: Floats, begins: Ints) -> Floats:
    """Log of the sum of exponentials of each group of the last axis; groups follow each other."""
    if not values.size:
        return values
    top = np.maximum.reduceat(values, begins, axis=-1)
    top[top == NEVER] = 0.0
    sizes = np.diff(begins, append=values.shape[-1])
    sums = np.add.reduceat(np.exp(values - np.repeat(top, sizes, axis=-1)), begins, axis=-1)
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(sums))
