"""The findings of a benchmark as a page of text, and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dgemma.errors import InputError

_FIXED = {
    "seconds_per_step": ("denoising step", "s"),
    "seconds_per_commit": ("commit", "s"),
    "seconds_per_causal_token": ("causal token", "s"),
    "tokens_per_second": ("committed tokens", "/s"),
    "seconds_to_first_text": ("first text", "s"),
    "seconds_per_canvas": ("canvas", "s"),
}


def page(found: dict[str, Any]) -> str:
    """All parts, each a small table, and the verdict at the end."""
    parts = [_fixed(found), _roofline(found), _lengths(found), _throughput(found), _real_prompts(found)]
    if found["skipped"]:
        parts.append("left out:\n" + "\n".join(f"  {line}" for line in found["skipped"]))
    parts.append(found["verdict"])
    return "\n\n".join(part for part in parts if part)


def _fixed(found: dict[str, Any]) -> str:
    plan = found["plan"]
    lines = [
        f"{found['machine']['processor']}, {found['machine']['cores']} cores; {found['dtype']} on "
        f"{found['device']}; prompt of {plan['prompt_tokens']}, {plan['canvases']} canvases of "
        f"{plan['steps']} steps; median (least-most) of {found['rounds']}",
        f"{'':<20}{'dgemma':>32}"
        + (f"{'reference':>32}{'dgemma is faster by':>28}" if "reference" in found else ""),
    ]
    for name, (label, unit) in _FIXED.items():
        if name not in found["dgemma"]:  # one canvas alone has no commit
            continue
        cells = [_spread(found["dgemma"][name], unit)]
        if name in found.get("reference", {}):
            cells += [_spread(found["reference"][name], unit), _spread(found["times_faster"][name], "x")]
        widths = (32, 32, 28)
        lines.append(f"{label:<20}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=False)))
    peaks = [
        "unknown" if size is None else f"{size / 1e6:,.0f} MB" for size in found["peak_extra_bytes"].values()
    ]
    lines.append(f"{'peak extra memory':<20}" + "".join(f"{peak:>32}" for peak in peaks))
    lines.append(f"{'weights':<20}{found['weight_bytes'] / 1e6:>29,.0f} MB")
    return "\n".join(lines)


def _roofline(found: dict[str, Any]) -> str:
    roofline = found.get("roofline")
    if roofline is None:
        return ""
    lines = [
        f"this machine: {roofline['peak_gflops']:,.0f} GFLOP/s, reads {roofline['read_gb_per_s']:.1f} GB/s",
        f"{'canvases':<20}{'step':>12}{'roofline':>12}{'share':>12}{'of cost model':>16}",
    ]
    for canvases, row in roofline["canvases"].items():
        lines.append(
            f"{canvases:<20}{row['seconds_per_step']:>11.3g}s{row['roofline_s']:>11.3g}s"
            f"{row['share_of_roofline']:>12.2f}{row['share_of_cost_model']:>16.2f}"
        )
    return "\n".join(lines)


def _lengths(found: dict[str, Any]) -> str:
    rows = found.get("lengths")
    if not rows:
        return ""
    steps = found["plan"]["length_steps"]
    heads = ["left to right", *(f"{k} steps" for k in steps)]
    lines = [
        "seconds of a reply (predicted), and times faster than left to right",
        f"{'tokens':<10}" + "".join(f"{head:>26}" for head in heads),
    ]
    for row in rows:
        cells = [_measured(row, "causal_s"), *(_measured(row, f"diffuse_{k}_s") for k in steps)]
        gains = ["", *(_times(row.get(f"diffuse_{k}_times_faster")) for k in steps)]
        joined = [f"{cell} {gain}".rstrip() for cell, gain in zip(cells, gains, strict=True)]
        lines.append(f"{row['tokens']:<10}" + "".join(f"{cell:>26}" for cell in joined))
    return "\n".join(lines)


def _throughput(found: dict[str, Any]) -> str:
    rows = found.get("throughput")
    if not rows:
        return ""
    head = f"{'answers at once':<20}{'diffusion':>16}{'left to right':>16}{'times faster':>16}"
    return "\n".join(
        ["committed tokens per second, after the prompt", head]
        + [
            f"{row['answers']:<20}{row['diffuse_tokens_per_second']:>16.4g}"
            f"{row['causal_tokens_per_second']:>16.4g}{row['diffuse_times_faster']:>16.2f}"
            for row in rows
        ]
    )


def _real_prompts(found: dict[str, Any]) -> str:
    rows = found.get("real_prompts")
    if not rows:
        return ""
    heads = {"tokens/s": 10, "first text": 12, "steps/canvas": 14, "with commit": 13, "tokens/forward": 16}
    lines = [
        "real prompts, adaptive steps",
        f"{'':<14}" + "".join(f"{head:>{width}}" for head, width in heads.items()),
    ]
    for name, row in rows.items():
        steps = [row.get(key) for key in ("steps_per_canvas", "steps_per_canvas_with_commit")]
        shown = ["-" if value is None else f"{value:.1f}" for value in steps]
        lines.append(
            f"{name:<14}{row['tokens_per_second']:>10.3g}{row['seconds_to_first_text']['median']:>11.3g}s"
            f"{shown[0]:>14}{shown[1]:>13}{row['tokens_per_forward']:>16.2f}"
        )
    return "\n".join(lines)


def check_can_draw() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise InputError('a figure needs matplotlib; run: pip install "dgemma[plot]"') from None


def write_figure(found: dict[str, Any], path: Path) -> None:
    """Replies by length and answers at once, as SVG (or what the name ends in)."""
    check_can_draw()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = found.get("lengths") or []
    names = {"causal_s": "left to right"} | {
        f"diffuse_{k}_s": f"{k} steps" for k in found["plan"]["length_steps"]
    }
    for name, label in names.items():
        points = [(row["tokens"], row[name]) for row in rows if name in row]
        if points:
            left.plot(*zip(*points, strict=True), marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="tokens of the reply", ylabel="seconds", title="one reply")
    many = found.get("throughput") or []
    for name, label in (("diffuse", f"{found['plan']['steps']} steps"), ("causal", "left to right")):
        points = [(row["answers"], row[f"{name}_tokens_per_second"]) for row in many]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=label)
    right.set(xscale="log", xlabel="answers at once", ylabel="committed tokens/s", title="several answers")
    for axes in (left, right):
        if axes.lines:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None


def _measured(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return "-"
    predicted = row.get(f"{name}_predicted")
    return f"{row[name]:.3g}s" + ("" if predicted is None else f" ({predicted:.3g}s)")


def _times(gain: float | None) -> str:
    return "" if gain is None else f"{gain:.2f}x"


def _spread(values: dict[str, float], unit: str) -> str:
    return f"{values['median']:.4g}{unit} ({values['min']:.4g}-{values['max']:.4g})"
