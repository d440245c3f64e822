"""Forward-backward and Viterbi over a canvas, for a DFA whose symbols are token classes.

At each position each class has a mass under the step's distribution (the emissions of a hidden Markov model).
Positions are independent, but only strings that lead from the start state to a final state count. The
backward pass sums over all of them from the last position to the first; samples and marginals then go from
the first position to the last. All of it is exact: the model's distribution, conditioned on the language of
the DFA.

Positions depend on each other in order, so this is many small sums. They run in 64 bits and in the log
domain, because over a canvas two states may differ by more than a float holds. They run on the CPU, whatever
device the model runs on: in a compiled kernel, or with numpy, which is the reference implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dgemma.kernels.forward_backward import kernel

# Shapes: canvas = positions, states, classes; transitions, edges and class_sets as `ClassDFA` defines them.

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

NEVER = -np.inf


@dataclass(frozen=True)
class ClassDFA:
    """Transitions in the order of the states they leave.

    An edge is a pair of states that at least one transition joins. Many edges carry the same set of classes:
    sums over classes are done once per set, then per edge.
    """

    transition_class: Ints  # [transitions]
    transition_to: Ints  # [transitions]
    begins: Ints  # [states + 1]: index of a state's first transition
    edge_from: Ints  # [edges], ascending
    edge_to: Ints  # [edges]
    edge_class_set: Ints  # [edges]
    class_set_begins: Ints  # [class_sets]
    class_set_members: Ints  # [members]: the classes of each set, concatenated
    num_classes: int

    @property
    def num_states(self) -> int:
        return len(self.begins) - 1


def class_dfa(transitions: NDArray[np.integer]) -> ClassDFA:
    """From the next state of each class in each state [classes, states]; -1 where there is no transition."""
    num_classes, num_states = transitions.shape
    source, symbol = map(np.ascontiguousarray, np.nonzero(transitions.T >= 0))
    target = transitions[symbol, source].astype(np.intp)
    edges, edge_of = np.unique(source * num_states + target, return_inverse=True)
    symbols_by_edge = symbol[np.argsort(edge_of, kind="stable")]
    bounds = np.append(0, np.cumsum(np.bincount(edge_of, minlength=len(edges)))).tolist()
    class_sets: dict[bytes, int] = {}
    edge_class_set = [
        class_sets.setdefault(symbols_by_edge[begin:end].tobytes(), len(class_sets))
        for begin, end in pairwise(bounds)
    ]
    members = [np.frombuffer(class_set, symbol.dtype) for class_set in class_sets]
    return ClassDFA(
        symbol,
        target,
        np.searchsorted(source, np.arange(num_states + 1)),
        edges // num_states,
        edges % num_states,
        np.array(edge_class_set, np.intp),
        np.cumsum([0, *map(len, members)])[: len(members)],
        np.concatenate([*members, np.empty(0, np.intp)]).astype(np.intp),
        num_classes,
    )


def backward(dfa: ClassDFA, emissions: Floats, final_states: Bools) -> Floats:
    """Backward messages: log mass of all strings that can follow each state [canvas + 1, states].

    emissions [canvas, classes]: log mass of each class. final_states [states]: True where a string may end.
    """
    return _backward(dfa, _set_sums(dfa, emissions, adds=True), final_states, adds=True)


def marginals(dfa: ClassDFA, emissions: Floats, start_state: int, betas: Floats) -> Floats:
    """Probability that a position holds a token of each class [canvas, classes]; `betas` from `backward`."""
    set_sums = _set_sums(dfa, emissions, adds=True)
    if (library := kernel()) is not None:
        return library.marginals(dfa, emissions, start_state, set_sums, betas)
    members = emissions[:, dfa.class_set_members]
    set_probs = np.zeros_like(set_sums)  # that a position takes a transition of each class set
    alpha = np.zeros(dfa.num_states)
    alpha[start_state] = 1.0
    for at in range(len(emissions)):
        reached = np.flatnonzero(alpha[dfa.edge_from])  # edges of states that can be reached
        source, class_set, to = dfa.edge_from[reached], dfa.edge_class_set[reached], dfa.edge_to[reached]
        probs = np.exp(set_sums[at, class_set] + betas[at + 1, to] - betas[at, source]) * alpha[source]
        set_probs[at] = np.bincount(class_set, probs, set_probs.shape[1])
        alpha = np.bincount(to, probs, dfa.num_states).astype(np.float64, copy=False)
    sizes = np.diff(dfa.class_set_begins, append=members.shape[1])
    set_of = np.repeat(np.arange(set_probs.shape[1]), sizes)
    own = set_probs[:, set_of] * np.exp(members - np.where(set_sums > NEVER, set_sums, 0.0)[:, set_of])
    found = np.zeros_like(emissions)
    for number, symbol in enumerate(dfa.class_set_members):
        found[:, symbol] += own[:, number]
    return found


def sample_path(dfa: ClassDFA, emissions: Floats, start_state: int, betas: Floats, races: Floats) -> Ints:
    """The classes of one string [canvas], sampled with its probability under the constraint.

    races [canvas, classes]: log of a unit exponential for each class. Of the transitions that leave a state
    the first to finish its exponential race is taken.
    """
    return _best_path(dfa, emissions - races, start_state, betas)


def viterbi(dfa: ClassDFA, best_emissions: Floats, start_state: int, final_states: Bools) -> Ints:
    """The classes of the most likely string [canvas].

    best_emissions [canvas, classes]: log-probability of each class's most likely token.
    """
    maxima = _set_sums(dfa, best_emissions, adds=False)
    return _best_path(dfa, best_emissions, start_state, _backward(dfa, maxima, final_states, adds=False))


def _best_path(dfa: ClassDFA, values: Floats, start_state: int, betas: Floats) -> Ints:
    """From the start state, at each position the best transition together with what can follow it."""
    if (library := kernel()) is not None:
        return library.best_path(dfa, values, start_state, betas)
    state = start_state
    path = np.empty(len(values), np.intp)
    for at in range(len(values)):
        own = slice(dfa.begins[state], dfa.begins[state + 1])
        symbols, to = dfa.transition_class[own], dfa.transition_to[own]
        best = np.argmax(values[at, symbols] + betas[at + 1, to])
        path[at], state = symbols[best], to[best]
    return path


def _backward(dfa: ClassDFA, set_values: Floats, final_states: Bools, *, adds: bool) -> Floats:
    """What can follow each state [canvas + 1, states]: the sum over its edges, or the best of them."""
    if (library := kernel()) is not None:
        return library.backward(dfa, set_values, np.where(final_states, 0.0, NEVER), adds=adds)
    betas = np.full((len(set_values) + 1, dfa.num_states), NEVER)
    betas[-1] = np.where(final_states, 0.0, NEVER)
    # States without transitions are left out: `reduceat` has no empty groups.
    sources, begins = np.unique(dfa.edge_from, return_index=True)
    for at in range(len(set_values) - 1, -1, -1) if len(sources) else ():
        paths = set_values[at, dfa.edge_class_set] + betas[at + 1, dfa.edge_to]
        betas[at, sources] = _log_sums(paths, begins) if adds else np.maximum.reduceat(paths, begins)
    return betas


def _set_sums(dfa: ClassDFA, emissions: Floats, *, adds: bool) -> Floats:
    """The log mass of each class set, or that of its best class [canvas, class_sets]."""
    if (library := kernel()) is not None:
        return library.sum_sets(dfa, emissions, adds=adds)
    members = emissions[:, dfa.class_set_members]
    if adds:
        return _log_sums(members, dfa.class_set_begins)
    return np.maximum.reduceat(members, dfa.class_set_begins, axis=1) if members.size else members


def _log_sums(values: Floats, begins: Ints) -> Floats:
    """Log-sum-exp of each group of the last axis; groups are adjacent and start at `begins`."""
    if not values.size:
        return values
    top = np.maximum.reduceat(values, begins, axis=-1)
    top[top == NEVER] = 0.0
    sizes = np.diff(begins, append=values.shape[-1])
    sums = np.add.reduceat(np.exp(values - np.repeat(top, sizes, axis=-1)), begins, axis=-1)
    with np.errstate(divide="ignore"):
        return np.asarray(top + np.log(sums))
