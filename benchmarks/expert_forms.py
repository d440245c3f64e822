"""Which form of the experts' products is fastest on this CPU: one by one, grouped, or padded.

python -m benchmarks.expert_forms
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.record import write
from dgemma.bench.timing import alternate, ratios, spread

SHAPES = {
    "released, 1 canvas": (128, 2816, 1408, 256, 8),
    "released, 8 canvases": (128, 2816, 1408, 2048, 8),
    "medium, 1 canvas": (32, 1024, 1024, 256, 4),
    "medium, 8 canvases": (32, 1024, 1024, 2048, 4),
    "medium, skewed": (32, 1024, 1024, 2048, 4),
}


def measure(name: str, rounds: int) -> dict[str, object]:
    experts, hidden, out, tokens, k = SHAPES[name]
    torch.manual_seed(0)
    weight = torch.randn(experts, out, hidden, dtype=torch.bfloat16) * 0.02
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
    scores = torch.rand(tokens, experts)
    if "skewed" in name:
        scores[:, 0] += 1  # one expert gets every token
    expert_of_pair, order = scores.topk(k).indices.flatten().sort(stable=True)
    rows = x[order // k]
    counts = torch.bincount(expert_of_pair, minlength=experts)
    ends = counts.cumsum(0).to(torch.int32)
    sizes = counts.tolist()
    capacity = -(-max(sizes) // 16) * 16
    rank = torch.arange(len(order)) - (ends - counts)[expert_of_pair]
    slot = expert_of_pair * capacity + rank

    def one_by_one() -> Tensor:
        groups = rows.split(sizes)
        return torch.cat([F.linear(g, weight[e]) for e, g in enumerate(groups) if len(g)])

    def grouped() -> Tensor:
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)

    def padded() -> Tensor:
        store = rows.new_zeros(experts * capacity, hidden)
        store[slot] = rows
        return torch.bmm(store.view(experts, capacity, hidden), weight.mT).view(-1, out)[slot]

    ways = {"one by one": one_by_one, "grouped_mm": grouped, "padded bmm": padded}
    for way in ways.values():
        torch.testing.assert_close(way(), one_by_one(), atol=0.05, rtol=0.05)
    seconds = alternate(ways, rounds)
    return {
        "rows per expert": {"mean": tokens * k / experts, "most": max(sizes)},
        "seconds": {way: spread(values) for way, values in seconds.items()},
        "against one by one": ratios(seconds, "one by one"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    write("expert_forms", {"findings": {name: measure(name, args.rounds) for name in SHAPES}})


if __name__ == "__main__":
    main()
