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

import numpy as np
from numpy.typing import NDArray

# Shapes: canvas = positions, states, arrows = of all states together, classes.

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

NEVER = -np.inf


@dataclass(frozen=True)
class Machine:
    """Arrows in the order of the states they leave."""

    arrow_from: Ints  # [arrows]
    arrow_class: Ints  # [arrows]
    arrow_to: Ints  # [arrows]
    begins: Ints  # [states + 1]: a state's arrows begin here
    num_classes: int

    @property
    def num_states(self) -> int:
        return len(self.begins) - 1


def machine_of(maps: NDArray[np.integer]) -> Machine:
    """From the next state of each class in each state [classes, states], -1 for none."""
    num_classes, num_states = maps.shape
    arrow_from, arrow_class = np.nonzero(maps.T >= 0)
    return Machine(
        arrow_from,
        arrow_class,
        maps[arrow_class, arrow_from].astype(np.intp),
        np.searchsorted(arrow_from, np.arange(num_states + 1)),
        num_classes,
    )


def what_follows(machine: Machine, masses: Floats, last: Bools) -> Floats:
    """Log of all that can follow each state before each position [canvas + 1, states].

    masses [canvas, classes]: log. last [states]: True where a string may end.
    """
    return _backward(machine, masses, last, adds=True)


def marginals(machine: Machine, masses: Floats, first: int, follows: Floats) -> Floats:
    """The probability that a position holds a word of each class [canvas, classes], from `what_follows`."""
    here = np.zeros(machine.num_states)
    here[first] = 1.0
    found = np.zeros((len(masses), machine.num_classes))
    for at in range(len(masses)):
        some = np.flatnonzero(here[machine.arrow_from])  # arrows of states that can be reached
        source, letter, to = machine.arrow_from[some], machine.arrow_class[some], machine.arrow_to[some]
        shares = np.exp(masses[at, letter] + follows[at + 1, to] - follows[at, source]) * here[source]
        found[at] = np.bincount(letter, shares, machine.num_classes)
        here = np.bincount(to, shares, machine.num_states).astype(np.float64, copy=False)
    return found


def draw(machine: Machine, masses: Floats, first: int, follows: Floats, clocks: Floats) -> Ints:
    """The classes of one string of the language [canvas], with its probability under the language.

    clocks [canvas, classes]: log of a unit exponential for each; of the arrows that leave a state the first
    to finish is taken.
    """
    return _walk(machine, masses - clocks, first, follows)


def best(machine: Machine, tops: Floats, first: int, last: Bools) -> Ints:
    """The classes of the likeliest string [canvas]; tops [canvas, classes]: log of each class's best word."""
    return _walk(machine, tops, first, _backward(machine, tops, last, adds=False))


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


def _backward(machine: Machine, values: Floats, last: Bools, *, adds: bool) -> Floats:
    """What can follow each state [canvas + 1, states]: the sum over its arrows, or the best of them."""
    follows = np.full((len(values) + 1, machine.num_states), NEVER)
    follows[-1] = np.where(last, 0.0, NEVER)
    # A state without arrows leads nowhere; `reduceat` knows no empty groups.
    busy = np.flatnonzero(np.diff(machine.begins))
    begins, group = machine.begins[busy], np.searchsorted(busy, machine.arrow_from)
    for at in range(len(values) - 1, -1, -1) if len(busy) else ():
        ways = values[at, machine.arrow_class] + follows[at + 1, machine.arrow_to]
        top = np.maximum.reduceat(ways, begins)
        if adds:
            top[top == NEVER] = 0.0
            with np.errstate(divide="ignore"):
                top += np.log(np.add.reduceat(np.exp(ways - top[group]), begins))
        follows[at, busy] = top
    return follows
