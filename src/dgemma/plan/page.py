"""What `dgemma plan` prints and draws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma.bench.report import check_can_draw
from dgemma.plan.planner import Goal, Plan, SizedFleet, Unreachable, dearer_from
from dgemma.plan.traffic import Traffic

if TYPE_CHECKING:
    from dgemma.plan.fleet import LoadResult

_WIDTH = 18


def page(title: str, traffic: Traffic, goal: Goal, plans: list[Plan]) -> str:
    lines = [
        title,
        f"{traffic.rate:g} requests/s, prompts of {traffic.prompt} and answers of {traffic.answer} tokens, "
        f"99 of 100 within {goal.p99_s:g} s",
        "",
        f"{'':<26}" + "".join(f"{plan.kind:>{_WIDTH}}" for plan in plans),
    ]
    for label, values in _rows(plans):
        lines.append(f"{label:<26}" + "".join(f"{value:>{_WIDTH}}" for value in values))
    lines += ["", *_verdict(plans)]
    return "\n".join(lines)


def _rows(plans: list[Plan]) -> list[tuple[str, list[str]]]:
    def of_all(label: str, value: str, unit: str = "", scale: float = 1.0) -> tuple[str, list[str]]:
        shown = []
        for plan in plans:
            found = plan.facts().get(value)
            shown.append("-" if found is None else f"{scale * found:,.4g}{unit}")
        return label, shown

    rows = [
        of_all("replicas", "replicas"),
        of_all("requests/s of one alone", "requests_per_s_of_one"),
        of_all("utilisation", "utilisation", " %", 100),
        of_all("answers in a step", "rows_of_a_step"),
        of_all("tokens/s", "tokens_per_s"),
        of_all("first text, p50", "first_text_p50_s", " s"),
        of_all("first text, p99", "first_text_p99_s", " s"),
        of_all("whole answer, p50", "answer_p50_s", " s"),
        of_all("whole answer, p99", "answer_p99_s", " s"),
        of_all("prompt tokens cached", "prefix_hit_share", " %", 100),
    ]
    if any(isinstance(plan, SizedFleet) and plan.price is not None for plan in plans):
        rows.append(of_all("price of 1 M tokens", "price_per_million_tokens"))
    return rows


def _verdict(plans: list[Plan]) -> list[str]:
    diffusion, causal = plans
    if isinstance(diffusion, Unreachable):
        return [f"One answer alone takes {diffusion.alone_s:.3g} s: no number of replicas meets the goal."]
    if isinstance(causal, Unreachable):
        return [
            f"Left to right, one answer alone takes {causal.alone_s:.3g} s: it meets the goal at no load."
        ]
    crossing = dearer_from(diffusion, causal)
    if crossing is None:
        return ["Left to right needs no fewer devices at any load within this goal."]
    return [
        f"From {crossing:.3g} requests/s on, left to right needs fewer devices: one of them takes "
        f"{causal.rate_each:.3g} requests/s within the goal."
    ]


def draw(plans: list[Plan], path: Path) -> None:
    """How fast the answers come, and the price by load: SVG, or what the name ends in."""
    check_can_draw()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    sized = [plan for plan in plans if isinstance(plan, SizedFleet)]
    with rc_context({"svg.hashsalt": "dgemma", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for plan, colour in zip(sized, ("#2563c9", "#c2570c"), strict=False):
            left.plot(
                *_distribution(plan.found), color=colour, label=f"{plan.kind}, {plan.replicas} replicas"
            )
            most = 4 * max(each.rate_each for each in sized)
            loads = [most * at / 400 for at in range(1, 401)]
            devices = [math.ceil(load / plan.rate_each) for load in loads]
            right.plot(loads, devices, color=colour, label=plan.kind)
        left.set(xlabel="seconds to the whole answer", ylabel="share of requests", ylim=(0, 1))
        right.set(xlabel="requests/s", ylabel="devices")
        for axes in (left, right):
            if axes.lines:
                axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _distribution(found: LoadResult) -> tuple[list[float], list[float]]:
    shares = [at / 200 for at in range(1, 200)]
    values = [found.quantile(share) for share in shares]
    whole = [(value, share) for value, share in zip(values, shares, strict=True) if math.isfinite(value)]
    return [value for value, _ in whole], [share for _, share in whole]
