"""Whether counts are what a distribution lets one expect."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """About standard normal if they are, over pools of outcomes, each expected about ten times or more."""
    assert counts[expected == 0].sum() == 0, "what has no probability was drawn"
    expected = expected.double()
    ordered, order = expected.sort(descending=True)
    pool_of = (ordered.cumsum(-1) // 10).long().unique_consecutive(return_inverse=True)[1]
    pool_of = pool_of.clamp(max=max(int(pool_of[-1]) - 1, 0))  # the last one may have hardly any mass

    def pool(values: Tensor) -> Tensor:
        return torch.zeros(int(pool_of[-1]) + 1).double().index_add(0, pool_of, values[order].double())

    pooled = pool(expected)
    statistic = ((pool(counts) - pooled) ** 2 / pooled).sum().item()
    freedom = len(pooled) - 1
    assert freedom, "there is one pool: nothing to compare"
    return float((statistic - freedom) / (2 * freedom) ** 0.5)
