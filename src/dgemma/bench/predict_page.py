"""What `dgemma bench --predict` prints: the cost model of a device as a page, as JSON, as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from dgemma.bench.devices import (
    CONTRADICTIONS,
    DEVICE_CLASSES,
    DEVICES,
    PUBLISHED,
    Kind,
    device_named,
)
from dgemma.bench.predict import (
    ASSUMED_STEPS,
    CAUSAL_EFFICIENCY,
    DRAFT_STEPS,
    EFFICIENCY,
    LOSSLESS_LENGTHS,
    RELEASED,
    Comparison,
    GrowthPoint,
    Prediction,
    ceiling,
    compare,
    default_format,
    fitted_to,
    growth,
    predict,
)
from dgemma.model.config import ModelConfig

_KINDS: tuple[Kind, ...] = ("diffusion", "causal")
_SHOWN = (("h100", "fp8"), ("rtx5090", "nvfp4"), ("dgx-spark", "nvfp4"), ("mac-studio", "int8"))


def predict_page(
    device_name: str, weight_format: str | None = None, config: ModelConfig = RELEASED, steps: int = 16
) -> str:
    device = device_named(device_name)
    form = weight_format or default_format(config, device)
    return page(predict(config, device, form, steps=steps), growth(config, device, form, steps=steps))


def predict_json(
    device_name: str, weight_format: str | None = None, config: ModelConfig = RELEASED, steps: int = 16
) -> dict[str, Any]:
    """The page for a program."""
    device = device_named(device_name)
    form = weight_format or default_format(config, device)
    found = predict(config, device, form, steps=steps)
    curves = growth(config, device, form, steps=steps)
    return {
        **asdict(replace(found, device=replace(device, flops=dict(device.flops)))),
        "efficiency_fitted_to": [one.device for one in fitted_to(device.device_class, "diffusion")],
        "causal_efficiency_fitted_to": [one.device for one in fitted_to(device.device_class, "causal")],
        "contradictions": list(CONTRADICTIONS.get(device.name, ())) if found.comparisons else [],
        "growth": {name: [asdict(one) for one in points] for name, points in curves.items()},
        "measured_by_us": False,
    }


def page(found: Prediction, curves: dict[str, tuple[GrowthPoint, ...]] | None = None) -> str:
    """Plain text: the costs, the published speeds beside the model, the curves, and one sentence."""
    lines = [*_head(found), *_costs(found), *_lossless_lines(found), *_fit_lines(found)]
    if found.comparisons:
        lines += _comparison_lines(found.comparisons)
        lines += [f"contradiction: {text}" for text in CONTRADICTIONS.get(found.device.name, ())]
    for name, points in (curves or {}).items():
        lines += _growth_lines(name, points)
    return "\n".join([*lines, _verdict(found)])


def _head(found: Prediction) -> list[str]:
    device = found.device
    peaks = ", ".join(f"{name} {value / 1e12:,.0f}" for name, value in device.flops.items())
    verdict = "fits" if found.fits else "does not fit"
    return [
        f"{device.label} ({device.device_class}): {device.bytes_per_s / 1e12:.3g} TB/s, TFLOP/s {peaks}, "
        f"{device.memory_bytes / 1e9:,.0f} GB",
        f"from {device.source}; nothing was run by us",
        f"{found.weight_format} weights {found.weight_bytes / 1e9:.1f} GB, with cache and activations "
        f"{found.memory_bytes / 1e9:.1f} GB: {verdict}",
        f"{found.canvases} at once, {found.context:,} tokens of context, {found.tokens:,} of answer, "
        f"{found.steps} steps per canvas",
    ]


def _costs(found: Prediction) -> list[str]:
    def row(name: str, *values: str) -> str:
        return f"  {name:<38}" + "".join(f"{value:>16}" for value in values)

    both = (found.step, found.causal)
    per_canvas = f"{found.steps} + 1 / canvas"
    return [
        row("", "diffusion", "left to right"),
        row("forwards", per_canvas, "1 / token"),
        row("experts touched per layer", *(f"{one.experts_touched:.0f}" for one in both)),
        row("read per forward, GB", *(f"{one.bytes / 1e9:.2f}" for one in both)),
        row("operations per forward, T", *(f"{one.operations / 1e12:.3g}" for one in both)),
        row("memory, ms at peak", *(f"{one.memory_s * 1e3:.2f}" for one in both)),
        row("compute, ms at peak", *(f"{one.compute_s * 1e3:.2f}" for one in both)),
        row("limited by", *(one.limited_by for one in both)),
        row("efficiency", f"{found.efficiency:.2f}", f"{found.causal_efficiency:.2f}"),
        row("ms per forward", *(f"{one.seconds * 1e3:.2f}" for one in both)),
        row(
            "tokens/s at the ceiling",
            f"{found.ceiling_tokens_per_s:,.0f}",
            f"{found.causal_ceiling_tokens_per_s:,.0f}",
        ),
        row("tokens/s predicted", f"{found.tokens_per_s:,.0f}", f"{found.causal_tokens_per_s:,.0f}"),
        row(
            "s for prompt and answer, as dgemma",
            f"{found.answer_s:.3g}",
            f"{found.causal_answer_s:.3g}",
        ),
    ]


def _lossless_lines(found: Prediction) -> list[str]:
    def row(name: str, values: Sequence[str]) -> str:
        return f"  {name:<38}" + "".join(f"{value:>10}" for value in values)

    points = found.lossless
    return [
        f"lossless, {DRAFT_STEPS} draft steps and one forward that verifies, by tokens that a canvas adds:",
        row("tokens per canvas", [str(one.tokens_per_canvas) for one in points]),
        row("tokens/s predicted", [f"{one.tokens_per_s:,.0f}" for one in points]),
        row("times left to right", [f"{one.ratio:.2f}" for one in points]),
    ]


def _fit_lines(found: Prediction) -> list[str]:
    name = found.device.device_class
    lines = []
    ways: tuple[tuple[str, Kind, float, str], ...] = (
        ("diffusion", "diffusion", found.efficiency, "no published figure: the mean of the other classes"),
        ("left to right", "causal", found.causal_efficiency, "no usable figure: taken as diffusion's"),
    )
    for label, kind, value, otherwise in ways:
        figures = fitted_to(name, kind)
        text = otherwise
        if figures:
            text = "fitted to " + ", ".join(f"{one.device} {one.figure:,.0f}" for one in figures)
            if kind == "diffusion" and any(one.steps is None for one in figures):
                text += f" ({ASSUMED_STEPS} steps assumed)"
        lines.append(f"efficiency of class {name!r}, {label}: {value:.2f}, {text}")
    return lines


def _comparison_lines(comparisons: Sequence[Comparison]) -> list[str]:
    lines = [f"  {'published':<34}{'tok/s':>8}{'predicted':>11}{'error':>8}{'left out':>10}   note"]
    for one in comparisons:
        published = one.published
        way = "left to right" if published.kind == "causal" else "diffusion"
        steps = "" if published.steps is None else f", K={published.steps}"
        count = "" if published.canvases == 1 else f", {published.canvases} at once"
        note = published.note
        if one.implied_steps is not None and not one.is_fitted:
            note += f"; the model would need {one.implied_steps:.0f} steps for it"
        left_out = f"{one.error_left_out:+.0%}" if one.is_fitted else "-"
        lines.append(
            f"  {published.weight_format + ' ' + way + steps + count:<34}{published.figure:>8,.0f}"
            f"{one.predicted:>11,.0f}{one.error:>+8.0%}{left_out:>10}   {note}"
        )
    lines.append(
        "  left out: the error when the efficiency is fitted without this figure; -: it never is fitted to it"
    )
    return lines


def _growth_lines(name: str, points: Sequence[GrowthPoint]) -> list[str]:
    lines = [f"  {name:<14}{'tok/s':>10}{'left to right':>16}{'ratio':>8}   limited by"]
    for one in points:
        full = "" if one.fits else ", does not fit"
        lines.append(
            f"  {one.value:<14,}{one.tokens_per_s:>10,.0f}{one.causal_tokens_per_s:>16,.0f}{one.ratio:>8.2f}"
            f"   {one.limited_by}{full}"
        )
    return lines


def _verdict(found: Prediction) -> str:
    way = (
        "about as fast as" if 0.9 < found.ratio < 1.1 else "faster than" if found.ratio > 1 else "slower than"
    )
    sentence = (
        f"On the {found.device.label}, with {found.weight_format} weights and {found.steps} steps, diffusion "
        f"is predicted to be {way} left to right: {found.tokens_per_s:,.0f} against "
        f"{found.causal_tokens_per_s:,.0f} tokens/s, {found.ratio:.2f} times, at efficiencies of "
        f"{found.efficiency:.2f} and {found.causal_efficiency:.2f} "
        f"({found.equal_ratio:.2f} times at equal ones)"
    )
    return sentence + ("." if found.fits else "; but it does not fit into the memory.")


def markdown_tables() -> str:
    """The tables of docs/performance-model.md."""
    lines = ["| class | diffusion | fitted to | left to right | fitted to |", "|---|---|---|---|---|"]
    for name in DEVICE_CLASSES:
        fits = [", ".join(one.device for one in fitted_to(name, kind)) for kind in _KINDS]
        lines.append(
            f"| {name} | {EFFICIENCY[name]:.2f} | {fits[0] or 'none: the mean of the others'} "
            f"| {CAUSAL_EFFICIENCY[name]:.2f} | {fits[1] or 'none: as diffusion'} |"
        )
    lines += [
        "",
        "| device | setting | published | ceiling | share | predicted | error | left out | lost/forward |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for published in PUBLISHED:
        one, way = compare(published), "left to right" if published.kind == "causal" else "diffusion"
        count = "" if published.canvases == 1 else f", {published.canvases} at once"
        steps = "" if published.steps is None else f", K = {published.steps}"
        left_out = f"{one.error_left_out:+.0%}" if one.is_fitted else "-"
        lines.append(
            f"| {published.device} | {published.weight_format} {way}{steps}{count}: {published.note} "
            f"| {published.figure:,.0f} | {ceiling(published):,.0f} | {one.share_of_ceiling:.2f} "
            f"| {one.predicted:,.0f} | {one.error:+.0%} | {left_out} | {one.lost_s * 1e3:.1f} ms |"
        )
    lines += [
        "",
        "| device | format | tok/s | left to right | ratio | at equal efficiency | limited by |",
        "|---|---|---|---|---|---|---|",
    ]
    for device in DEVICES.values():
        found = predict(RELEASED, device, default_format(RELEASED, device))
        lines.append(
            f"| {device.name} | {found.weight_format} | {found.tokens_per_s:,.0f} "
            f"| {found.causal_tokens_per_s:,.0f} | {found.ratio:.2f} | {found.equal_ratio:.2f} "
            f"| {found.limited_by} |"
        )
    lines += [
        "",
        "| device | " + " | ".join(f"{length} tokens per canvas" for length in LOSSLESS_LENGTHS) + " |",
        "|---|" + "---|" * len(LOSSLESS_LENGTHS),
    ]
    for shown, form in _SHOWN:
        found = predict(RELEASED, DEVICES[shown], form)
        cells = (f"{one.tokens_per_s:,.0f} ({one.ratio:.2f})" for one in found.lossless)
        lines.append(f"| {shown} {form} | " + " | ".join(cells) + " |")
    for curve in ("context", "concurrency", "canvas"):
        columns = [growth(RELEASED, DEVICES[one], form)[curve] for one, form in _SHOWN]
        lines += ["", f"| {curve} | " + " | ".join(f"{one} {form}" for one, form in _SHOWN) + " |"]
        lines.append("|---|" + "---|" * len(_SHOWN))
        for points in zip(*columns, strict=True):
            cells = (
                f"{one.tokens_per_s:,.0f} ({one.ratio:.2f})" + ("" if one.fits else ", too large")
                for one in points
            )
            lines.append(f"| {points[0].value:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
