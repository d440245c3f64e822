"""Devices with their vendors' figures, and published speeds of the released model. Imports no torch.

None of these devices was run by us: they are the input of `dgemma.bench.predict`, not results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dgemma.errors import InputError, suggestion

DeviceClass = Literal["datacenter gpu", "consumer gpu", "unified memory", "apple", "cpu"]
DEVICE_CLASSES: tuple[DeviceClass, ...] = (
    "datacenter gpu", "consumer gpu", "unified memory", "apple", "cpu",
)  # fmt: skip
Kind = Literal["diffusion", "causal"]


@dataclass(frozen=True)
class Device:
    """What a device reads and computes in a second, as its vendor states it."""

    name: str
    label: str
    device_class: DeviceClass
    bytes_per_s: float
    flops: Mapping[str, float]  # dense, by compute format: bf16, fp8, fp4; what is missing runs as bf16
    memory_bytes: float
    source: str

    def peak(self, compute: str) -> float:
        return self.flops.get(compute, self.flops["bf16"])


_HOPPER = {"bf16": 989e12, "fp8": 1979e12}
_NVIDIA = "NVIDIA's data sheet"
_SPARSE = "; peak rates are half of those stated with sparsity"
_APPLE = "Apple's specifications; Apple states no FLOP/s: derived from GPU cores and clock, no tensor units"

_ALL = (
    Device("h100", "NVIDIA H100 SXM", "datacenter gpu", 3.35e12, _HOPPER, 80e9, _NVIDIA + _SPARSE),
    Device("h200", "NVIDIA H200 SXM", "datacenter gpu", 4.8e12, _HOPPER, 141e9, _NVIDIA + _SPARSE),
    Device(
        "b200", "NVIDIA B200", "datacenter gpu", 8e12, {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9e15}, 180e9,
        _NVIDIA + " of the HGX B200, per GPU" + _SPARSE,
    ),
    Device(
        "dgx-station", "NVIDIA DGX Station (GB300)", "datacenter gpu", 7.1e12,
        {"bf16": 2.5e15, "fp8": 5e15, "fp4": 15e15}, 252e9,
        _NVIDIA + "; 8 TB/s and 288 GB were announced first. Its GPU memory alone is counted",
    ),
    Device(
        "a100", "NVIDIA A100 SXM 80 GB", "datacenter gpu", 2.039e12, {"bf16": 312e12}, 80e9, _NVIDIA,
    ),
    Device(
        "l40s", "NVIDIA L40S", "datacenter gpu", 864e9, {"bf16": 362e12, "fp8": 733e12}, 48e9,
        _NVIDIA + _SPARSE,
    ),
    Device(
        "rtx5090", "NVIDIA GeForce RTX 5090", "consumer gpu", 1.792e12,
        {"bf16": 209.5e12, "fp8": 419e12, "fp4": 1676e12}, 32e9,
        "NVIDIA's Blackwell paper; dense, sums in fp32",
    ),
    Device(
        "rtx4090", "NVIDIA GeForce RTX 4090", "consumer gpu", 1.008e12,
        {"bf16": 165.2e12, "fp8": 330.3e12}, 24e9, "NVIDIA's Ada paper; dense, sums in fp32",
    ),
    Device(
        "dgx-spark", "NVIDIA DGX Spark (GB10)", "unified memory", 273e9,
        {"bf16": 125e12, "fp8": 250e12, "fp4": 500e12}, 128e9,
        _NVIDIA + "; only 1 PFLOP/s of sparse fp4 is stated: the others are halves of it",
    ),
    Device("m4-max", "Apple M4 Max, 40 GPU cores", "apple", 546e9, {"bf16": 16e12}, 128e9, _APPLE),
    Device(
        "mac-studio", "Apple Mac Studio, M3 Ultra, 80 GPU cores", "apple", 819e9, {"bf16": 28e12}, 512e9,
        _APPLE,
    ),
    Device(
        "epyc-9755", "AMD EPYC 9755, 128 cores, one socket", "cpu", 614e9, {"bf16": 44e12}, 768e9,
        "AMD's specifications: 12 channels of DDR5-6400; peak derived from cores, base clock and AVX-512 "
        "width; memory as fitted with 64 GB modules",
    ),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _ALL}


def device_named(name: str) -> Device:
    found = DEVICES.get(name.lower())
    if found is None:
        end = suggestion(name.lower(), DEVICES)
        raise InputError(f"{name!r} is not a known device{end} Known: {', '.join(DEVICES)}.", field="device")
    return found


@dataclass(frozen=True)
class Published:
    """A speed somebody published for the released model. `note` says what the figure leaves open."""

    device: str
    weight_format: str
    steps: int | None  # K of every canvas; None: adaptive, or not stated
    figure: float  # tokens per second of all sequences
    kind: Kind
    note: str
    canvases: int = 1  # sequences at once
    is_usable: bool = True  # False: shown beside the prediction, never fitted to; `note` says why
    source: str = "collected by November 2026, the first publisher not noted"


_VLLM = "vLLM's tests, June 2026"
_SPARK = "ai-muninn.com with vLLM, summer 2026"
_MAC = "astgl.com with MLX, 2026-06-19"

PUBLISHED: tuple[Published, ...] = (
    Published("h100", "fp8", 16, 1008, "diffusion", "batch 1, 16 steps fixed", source=_VLLM),
    Published(
        "h100", "fp8", None, 375, "diffusion", "adaptive, real prompts, end to end, TTFT 489 ms",
        is_usable=False, source=_VLLM,
    ),
    Published(
        "h100", "fp8", None, 197, "causal", "beside the 16 fixed steps; 389 with multi-token prediction",
        source=_VLLM,
    ),
    Published(
        "h100", "fp8", None, 199, "causal", "beside the adaptive figure, end to end, TTFT 53 ms",
        is_usable=False, source=_VLLM,
    ),
    Published("h200", "fp8", 16, 1288, "diffusion", "same test as the H100's", source=_VLLM),
    Published("l40s", "nvfp4", None, 430, "diffusion", "steps not stated"),
    Published("l40s", "nvfp4", None, 103, "causal", "beside the figure of 430"),
    Published(
        "rtx5090", "nvfp4", None, 700, "diffusion", "published as 700+; steps not stated",
        source="Google, 2026-06-10",
    ),
    Published("rtx4090", "int4", None, 550, "diffusion", "published as 525-575; steps not stated"),
    Published(
        "dgx-spark", "nvfp4", None, 152, "diffusion", "published as 146-158; adaptive, the canvas filled",
        source=_SPARK,
    ),
    Published(
        "dgx-spark", "nvfp4", None, 257, "diffusion", "four requests at once, all together", canvases=4,
        is_usable=False, source=_SPARK,
    ),
    Published(
        "dgx-spark", "nvfp4", None, 52, "causal", "the dense weights' format is not stated",
        source="ai-muninn.com with vLLM 0.19, 2026-04-05",
    ),
    Published(
        "dgx-station", "nvfp4", None, 800, "diffusion", "'up to 800'; format and steps not stated",
        is_usable=False,
    ),
    Published(
        "dgx-station", "nvfp4", None, 2000, "diffusion", "'up to 2,000'; format and steps not stated",
        is_usable=False, source="NVIDIA, 2026-06-11",
    ),
    Published(
        "mac-studio", "int8", None, 43, "diffusion", "8-bit; chip and steps not stated", source=_MAC
    ),
    Published("mac-studio", "int8", None, 61, "causal", "8-bit; beside the figure of 43", source=_MAC),
)  # fmt: skip

# Where published figures disagree with each other or with the roofline.
CONTRADICTIONS: dict[str, tuple[str, ...]] = {
    "h100": (
        "1,008 tok/s (16 fixed steps, full canvases) and 375 tok/s (adaptive, real prompts, end to end) are "
        "both published for the same GPU: the first is a speed of steps, the second a speed of answers.",
    ),
    "rtx4090": (
        "525-575 tok/s is published with INT4; a community estimate for the same card says 200-400.",
    ),
    "dgx-spark": (
        "Four requests at once are published as 257 tok/s together, 1.7 times one alone, where reading the "
        "weights once for all would give nearly four times: take the concurrency curve as an upper bound.",
        "The left-to-right figure of 52 tok/s lies above the ceiling with dense weights in bf16: the "
        "sibling model's must have been smaller. It is not fitted to.",
    ),
    "dgx-station": (
        "'Up to 800' and 'up to 2,000' tok/s both circulate, 2.5 times apart; neither states format or "
        "steps. Neither is fitted to.",
    ),
}  # fmt: skip
