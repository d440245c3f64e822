"""Which schemas lead back to themselves: groups of schemas that can be reached from each other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def circles(arrows: Mapping[K, Sequence[K]]) -> dict[K, int]:
    """The group of each node that lies on a circle; the others are left out. Tarjan, without recursion."""
    order: dict[K, int] = {}
    lowest: dict[K, int] = {}
    open_: list[K] = []
    is_open: set[K] = set()
    group: dict[K, int] = {}
    groups = 0
    for root in arrows:
        if root in order:
            continue
        walk = [(root, iter(arrows[root]))]
        order[root] = lowest[root] = len(order)
        open_.append(root)
        is_open.add(root)
        while walk:
            node, rest = walk[-1]
            for to in rest:
                if to not in order:
                    order[to] = lowest[to] = len(order)
                    open_.append(to)
                    is_open.add(to)
                    walk.append((to, iter(arrows[to])))
                    break
                if to in is_open:
                    lowest[node] = min(lowest[node], order[to])
            else:
                walk.pop()
                if walk:
                    lowest[walk[-1][0]] = min(lowest[walk[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    at = open_.index(node)
                    found, open_[at:] = open_[at:], []
                    is_open.difference_update(found)
                    if len(found) > 1 or node in arrows[node]:
                        group |= dict.fromkeys(found, groups)
                        groups += 1
    return group
