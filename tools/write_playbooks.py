"""Write the computed parts of docs/playbooks: weights and memory, commands, predicted and published speeds.

    python -m tools.write_playbooks

A part stands between `<!-- NAME, by tools/write_playbooks.py -->` and `<!-- end of NAME -->`; the rest of a
page is written by hand. `tests/tools/test_write_playbooks.py` compares the committed pages with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dgemma.bench.devices import CONTRADICTIONS, DEVICES, PUBLISHED, Device
from dgemma.bench.playbooks import (
    EXTRA_BYTES,
    NVFP4_NAME,
    PLAYBOOKS,
    WEIGHTS,
    Playbook,
    commands,
    efficiency_range,
)
from dgemma.bench.predict import EFFICIENCY, FORMATS, RELEASED, compare, predict, weight_bytes
from dgemma.checkpoint.hub import EXAMPLE_NAME
from dgemma.checkpoint.parameter_count import count_parameters
from dgemma.errors import InputError
from dgemma.plan.hardware import Hardware, predicted_shape

PAGES = Path(__file__).resolve().parent.parent / "docs" / "playbooks"
PART = re.compile(
    r"(<!-- (?P<name>\w+), by tools/write_playbooks\.py -->\n).*?(<!-- end of (?P=name) -->\n)", re.DOTALL
)
_MAX_SEQS = (64, 32, 16, 8, 4, 2, 1)
_LENGTH = 8192
_FORMS = {
    "bf16": f"`{EXAMPLE_NAME}`",
    "fp8": "published by others",
    "int8": "`--format int8`, made here",
    "nvfp4": f"`{NVFP4_NAME}`",
    "int4": "`--format int4`, made here",
}
# What decoding a weight for its product moves through memory in torch, in bytes: an fp32 copy, its scales
# multiplied in place, a bf16 copy, and reading that. Codes of 4 bits are unpacked before.
_DECODED_BYTES = {"fp8": 21, "int8": 21, "nvfp4": 32, "int4": 32}
_DECODED = "decoded for each product: saves memory, not time"
_HOW: dict[str, dict[str, str]] = {
    "cuda": {
        "bf16": "torch's grouped product",
        "fp8": _DECODED,
        "int8": _DECODED,
        "nvfp4": "experts by our Triton kernel, dense layers in bf16",
        "int4": "experts by our Triton kernel, dense layers (int8) decoded",
    },
    "mps": {
        "bf16": "torch, one expert after another",
        "fp8": "no: torch 2.13 has no fp8 there",
        "int8": _DECODED,
        "nvfp4": "no: its scales are fp8",
        "int4": _DECODED,
    },
    "cpu": {
        "bf16": "torch with AMX or AVX-512 bf16, else in fp32 or by our kernel",
        "fp8": _DECODED,
        "int8": "our kernel with AVX-512, else decoded",
        "nvfp4": "our kernel with AVX-512, else decoded",
        "int4": "our kernel with AVX-512, else decoded",
    },
}


def in_memory(form: str) -> float:
    """Bytes of the weights: as `dgemma info` counts those that dgemma makes, else as they are published."""
    return WEIGHTS[form].num_bytes if form in WEIGHTS else weight_bytes(RELEASED, form)


def decoded_bytes(form: str, device: str) -> float:
    """What a step moves for weights that are decoded for each product, beside what the cost model counts."""
    if form == "bf16" or (device == "cpu" and form != "fp8"):
        return 0
    parts = count_parameters(RELEASED).parameters_by_part
    # The head and the soft embedding are two products.
    dense = sum(parts.values()) - parts["experts"] + parts["embedding"]
    if form in ("nvfp4", "int4") and device == "cuda":  # experts have a kernel; int4 has int8 beside them
        return _DECODED_BYTES["int8"] * dense if form == "int4" else 0
    if form == "fp8":  # the published ones leave the embedding in bf16
        dense -= 2 * parts["embedding"]
    kind = "int8" if form == "int4" else form
    return _DECODED_BYTES[form] * parts["experts"] + _DECODED_BYTES[kind] * dense


def sequences(device: Device, form: str) -> int:
    """How many of 8,192 tokens the planner admits at once, each with its canvas and all of its cache."""
    for count in _MAX_SEQS:
        try:
            shape = predicted_shape(Hardware(device, 1), form, max_len=_LENGTH, max_num_seqs=count)
        except InputError:
            continue
        if shape.capacity.full_blocks * shape.block_size >= count * _LENGTH:
            return count
    return 0


def longest(device: Device, form: str) -> int:
    """Tokens of the longest single sequence, by the planner; 0 if there is no room for a canvas."""
    try:
        shape = predicted_shape(Hardware(device, 1), form, max_len=RELEASED.max_positions, max_num_seqs=1)
    except InputError:
        return 0
    return min(shape.capacity.full_blocks * shape.block_size, RELEASED.max_positions)


def weights_part(playbook: Playbook) -> str:
    lines = []
    for name in playbook.devices:
        device = DEVICES[name]
        usable = playbook.memory_share * device.memory_bytes
        share = f", of which {usable / 1e9:,.0f} GB for the GPU" if playbook.memory_share < 1 else ""
        if len(playbook.devices) > 1:
            lines += [f"### {device.label}", ""]
        lines += [
            f"{device.memory_bytes / 1e9:,.0f} GB{share}, {device.bytes_per_s / 1e9:,.0f} GB/s "
            f"({device.source}).",
            "",
            "| format | weights | in memory | fits | sequences of 8,192 tokens | longest sequence "
            "| products in dgemma |",
            "|---|---|---:|---|---:|---:|---|",
        ]
        # The planner knows a device by its memory alone.
        planned = replace(device, memory_bytes=usable)
        for form, where in _FORMS.items():
            size = in_memory(form)
            count, tokens = sequences(planned, form), longest(planned, form)
            fits = size + EXTRA_BYTES <= usable and count > 0
            cells = (f"{count}", f"{tokens:,}") if fits else ("-", "-")
            lines.append(
                f"| {form} | {where} | {size / 1e9:.1f} GB | {'yes' if fits else 'no'} | {cells[0]} "
                f"| {cells[1]} | {_HOW[playbook.device][form]} |"
            )
        lines.append("")
    return "\n".join(lines)


def commands_part(playbook: Playbook) -> str:
    """For the weights that are best there, and, where they are others, for the machine with least memory."""
    device = DEVICES[playbook.devices[0]]
    weights = playbook.weights_for(device.memory_bytes)
    assert weights is not None
    lines = [
        f"With {weights.name} weights ({weights.num_bytes / 1e9:.1f} GB):",
        "",
        "<!-- not run: needs the device and the released weights; a test parses each line -->",
        "```sh",
    ]
    for purpose, command in commands(playbook, weights):
        lines += [f"# {purpose}", command]
    lines.append("```")
    for other in (WEIGHTS[one] for one in playbook.weights if one != weights.name):
        least = other.needed_bytes / playbook.memory_share
        lines += [
            "",
            f"With {other.name} weights ({other.num_bytes / 1e9:.1f} GB, from {least / 1e9:.0f} GB of memory "
            "on) instead:",
            "",
            "<!-- not run: needs the device and the released weights; a test parses each line -->",
            "```sh",
            *(command for _, command in commands(playbook, other)[2:]),
            "```",
        ]
    return "\n".join([*lines, ""])


def speed_part(playbook: Playbook) -> str:
    """Of the cost model, whose efficiency is fitted to software that computes in the formats themselves."""
    lines = [
        "One answer at a time, a context of 1,024, tokens per second. *Ceiling* is the data sheet's. *Range*",
        "spans what published speeds reached of their ceilings: in this class of devices, or in all if",
        "this one has fewer than two.",
        "",
        "| device | format | 16 steps | range | ceiling | 12 steps | 48 steps | 16 steps, dgemma today |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in playbook.devices:
        device = DEVICES[name]
        low, high = efficiency_range(device.device_class)
        for form in _FORMS:
            found = predict(RELEASED, device, form)
            if not found.fits or _HOW[playbook.device][form].startswith("no:"):
                continue
            others = [predict(RELEASED, device, form, steps=steps).tokens_per_s for steps in (12, 48)]
            top = found.ceiling_tokens_per_s
            # Whatever the format, dgemma multiplies in bf16.
            plain = replace(FORMATS[form], experts_compute="bf16", dense_compute="bf16")
            step_s = predict(RELEASED, device, plain).step.seconds
            step_s += decoded_bytes(form, playbook.device) / device.bytes_per_s / found.efficiency
            today = RELEASED.canvas_len / (17 * step_s)
            numbers = [f"{found.tokens_per_s:,.0f}", f"{low * top:,.0f} - {high * top:,.0f}"]
            numbers += [f"{value:,.0f}" for value in (top, *others, today)]
            lines.append(f"| {device.label} | {form} | {' | '.join(numbers)} |")
    name = DEVICES[playbook.devices[0]].device_class
    lines += [
        "",
        f"Efficiency of this class: {EFFICIENCY[name]:.2f} ([how](../performance-model.md#efficiency)).",
        "",
    ]
    published = [one for one in PUBLISHED if one.device in playbook.devices]
    if not published:
        return "\n".join([*lines, "Nothing is published for such a machine that we know of.", ""])
    lines += [
        "| published | tokens/s | predicted for it | setting | source |",
        "|---|---:|---:|---|---|",
    ]
    for one in published:
        way = "left to right" if one.kind == "causal" else "diffusion"
        lines.append(
            f"| {DEVICES[one.device].label}, {one.weight_format} {way} | {one.figure:,.0f} "
            f"| {compare(one).predicted:,.0f} | {one.note} | {one.source} |"
        )
    lines.append("")
    for name in playbook.devices:
        lines += [f"- {text}" for text in CONTRADICTIONS.get(name, ())]
    return "\n".join([*lines, ""]) if lines[-1] else "\n".join(lines)


PARTS: dict[str, Callable[[Playbook], str]] = {
    "weights": weights_part,
    "commands": commands_part,
    "speed": speed_part,
}


def written(text: str, playbook: Playbook) -> str:
    """The page with its computed parts."""

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match['name']](playbook)}\n{match[3]}"

    return PART.sub(part, text)


def main() -> None:
    for playbook in PLAYBOOKS.values():
        page = PAGES / f"{playbook.name}.md"
        page.write_text(written(page.read_text(), playbook))


if __name__ == "__main__":
    main()
