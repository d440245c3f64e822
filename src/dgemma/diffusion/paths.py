"""Strings of a language over a whole canvas: the best one, draws, and what each position is likely to hold.

A language is a machine whose letters are token classes. At each position each class has a mass under the
step's distribution; positions are independent, but only strings that lead from the first state to an allowed
last one count. Sums over all of them go from the last position to the first (how much can still follow a
state), and draws and marginals from the first to the last. All of it is exact: sampling from the model's
distribution, conditioned on the language.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: canvas = positions, states, arrows = the most that leave a state, classes.

NEVER = float("-inf")


@dataclass(frozen=True)
class Machine:
    """Arrows that leave each state; where there are fewer, the rest lead to a state that nothing follows."""

    arrow_class: Tensor  # [states, arrows]
    arrow_to: Tensor  # [states, arrows]; `states`: nowhere
    num_classes: int

    @property
    def num_states(self) -> int:
        return self.arrow_to.shape[0]


@dataclass(frozen=True)
class Marginals:
    """Conditioned on the language."""

    classes: Tensor  # [canvas, classes]: probability that a position holds a word of the class
    log_total: Tensor  # []: log-probability that a free draw belongs to the language


def machine_of(maps: Tensor) -> Machine:
    """From the next state of each class in each state [classes, states], -1 for none."""
    num_classes, num_states = maps.shape
    live = (maps >= 0).T  # [states, classes]
    most = max(1, int(live.sum(1).max()))
    # Live classes first, in their order.
    order = live.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    there = live.gather(1, order)
    to = torch.where(there, maps.T.gather(1, order), num_states)
    return Machine(torch.where(there, order, 0), to, num_classes)


def what_follows(machine: Machine, masses: Tensor, last: Tensor) -> Tensor:
    """Log of all that can follow each state before each position [canvas + 1, states + 1].

    masses [canvas, classes]: log. last [states]: True where a string may end.
    """
    follows = masses.new_full((masses.shape[0] + 1, machine.num_states + 1), NEVER)
    follows[-1, :-1] = torch.where(last, 0.0, NEVER)
    for at in range(masses.shape[0] - 1, -1, -1):
        ways = masses[at][machine.arrow_class] + follows[at + 1][machine.arrow_to]
        follows[at, :-1] = ways.logsumexp(1)
    return follows


def marginals(machine: Machine, masses: Tensor, first: int, follows: Tensor) -> Marginals:
    """What each position holds, from `what_follows`."""
    here = masses.new_zeros(machine.num_states + 1)
    here[first] = 1.0
    found = masses.new_zeros(masses.shape[0], machine.num_classes)
    for at in range(masses.shape[0]):
        shares = here[:-1, None] * _next_shares(machine, masses, follows, at)
        found[at].index_add_(0, machine.arrow_class.flatten(), shares.flatten())
        here = torch.zeros_like(here).index_add_(0, machine.arrow_to.flatten(), shares.flatten())
    return Marginals(found, follows[0, first])


def draw(machine: Machine, masses: Tensor, first: int, follows: Tensor, clocks: Tensor) -> Tensor:
    """The classes of one string of the language [canvas], with its probability under the language.

    clocks [canvas, classes]: log of a unit exponential for each; of the arrows that leave a state the first
    to finish is taken.
    """
    state = torch.tensor(first, device=masses.device)
    chosen = []
    for at in range(masses.shape[0]):
        classes, to = machine.arrow_class[state], machine.arrow_to[state]
        arrow = (clocks[at][classes] - masses[at][classes] - follows[at + 1][to]).argmin()
        chosen.append(classes[arrow])
        state = to[arrow]
    return torch.stack(chosen)


def best(machine: Machine, tops: Tensor, first: int, last: Tensor) -> Tensor:
    """The classes of the likeliest string [canvas]; tops [canvas, classes]: log of each class's best word."""
    value = torch.cat([torch.where(last, 0.0, NEVER).to(tops.dtype), tops.new_full((1,), NEVER)])
    choices = []
    for at in range(tops.shape[0] - 1, -1, -1):
        ways = tops[at][machine.arrow_class] + value[machine.arrow_to]
        top, arrow = ways.max(1)
        choices.append(arrow)
        value = torch.cat([top, tops.new_full((1,), NEVER)])
    choices.reverse()
    state = torch.tensor(first, device=tops.device)
    chosen = []
    for arrow in choices:
        taken = arrow[state]
        chosen.append(machine.arrow_class[state, taken])
        state = machine.arrow_to[state, taken]
    return torch.stack(chosen)


def _next_shares(machine: Machine, masses: Tensor, follows: Tensor, at: int) -> Tensor:
    """Of each state, the probability of each arrow [states, arrows]; zeros where nothing follows."""
    ways = masses[at][machine.arrow_class] + follows[at + 1][machine.arrow_to]
    total = follows[at, :-1, None]
    return torch.where(total > NEVER, (ways - total).exp(), 0.0).nan_to_num(0.0)
