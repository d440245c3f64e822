"""Which weights of the released model a kind of machine should run, and what to type. Imports no torch.

One source for the end of `dgemma doctor` and for the pages in docs/playbooks, which
`python -m tools.write_playbooks` writes. None of these machines was run by us.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from dgemma.bench.devices import DEVICES, PUBLISHED
from dgemma.bench.predict import RELEASED, ceiling, weight_bytes
from dgemma.checkpoint.hub import EXAMPLE_NAME
from dgemma.checkpoint.parameter_count import count_parameters

# What is needed beside the weights, as `dgemma run` and `dgemma info` count it.
EXTRA_BYTES = 2_000_000_000
NVFP4_NAME = "nvidia/diffusiongemma-26B-A4B-it-NVFP4"
_MADE = "dgemma-26b-{}"  # the directory of weights that are quantized here
BUNDLED_COMMAND = 'dgemma run bundled:text "On Sunday Emma and Tom"'


@dataclass(frozen=True)
class Weights:
    """A form of the released weights that dgemma fetches or makes."""

    name: str  # of `dgemma.bench.predict.FORMATS`
    num_bytes: float  # in memory
    format: str | None = None  # of `dgemma run --format`: int8 and int4 are made here
    model: str = EXAMPLE_NAME

    @property
    def needed_bytes(self) -> float:
        return self.num_bytes + EXTRA_BYTES


def _weights() -> dict[str, Weights]:
    sizes = count_parameters(RELEASED).bytes
    return {
        "bf16": Weights("bf16", sizes["bf16"], "plain"),
        "nvfp4": Weights("nvfp4", weight_bytes(RELEASED, "nvfp4"), model=NVFP4_NAME),
        "int8": Weights("int8", sizes["int8"], "int8"),
        "int4": Weights("int4", sizes["4bit"], "int4"),
    }


WEIGHTS: dict[str, Weights] = _weights()


@dataclass(frozen=True)
class Playbook:
    """A page. `weights`: the forms that are worth trying there, the best first."""

    name: str
    title: str
    device: str  # of --device
    devices: tuple[str, ...]  # of `dgemma.bench.devices`
    weights: tuple[str, ...]
    memory_share: float = 1.0  # of the memory that the device may use
    min_cores: int = 1  # with fewer an answer of the released model takes many minutes

    @property
    def page(self) -> str:
        return f"docs/playbooks/{self.name}.md"

    def weights_for(self, memory_bytes: float, cores: int = 1_000) -> Weights | None:
        """The first that fits; None: the released model does not fit in any form, or is too slow."""
        if cores < self.min_cores:
            return None
        usable = self.memory_share * memory_bytes
        return next((WEIGHTS[one] for one in self.weights if WEIGHTS[one].needed_bytes <= usable), None)

    def first_command(self, memory_bytes: float, cores: int) -> str:
        """The one to type first."""
        weights = self.weights_for(memory_bytes, cores)
        return BUNDLED_COMMAND if weights is None else run_command(self, weights)


_ALL = (
    # 24 and 32 GB hold 4 bits alone. The published NVFP4 weights are the smaller download, and their dense
    # layers, in bf16, are not decoded for each product as those of our int4 are.
    Playbook(
        "rtx-4090-5090", "RTX 4090 and RTX 5090", "cuda", ("rtx4090", "rtx5090"), ("nvfp4", "int4")
    ),
    # All of it fits, but a step would read three times as many bytes through 273 GB/s.
    Playbook("dgx-spark", "DGX Spark", "cuda", ("dgx-spark",), ("nvfp4", "int4")),
    Playbook("dgx-station", "DGX Station", "cuda", ("dgx-station",), ("bf16", "nvfp4")),
    Playbook("h100", "H100 and other data centre GPUs", "cuda", ("h100", "h200"), ("bf16", "nvfp4")),
    # macOS keeps about a quarter of the memory from the GPU. Arithmetic limits: decoding weights would cost.
    Playbook(
        "apple-silicon", "Apple silicon", "mps", ("m4-max", "mac-studio"), ("bf16", "int8", "int4"),
        memory_share=0.75,
    ),
    # Two cores took 17.7 s for a step (docs/quantized.md).
    Playbook("cpu", "A CPU box", "cpu", ("epyc-9755",), ("int4",), min_cores=8),
)  # fmt: skip
PLAYBOOKS: dict[str, Playbook] = {playbook.name: playbook for playbook in _ALL}

# By the name that CUDA reports; the first that matches.
_NAMES = (
    (re.compile(r"\bGB10\b"), "dgx-spark"),
    (re.compile(r"\bGB300\b"), "dgx-station"),
    (re.compile(r"\b(4090|5090)\b"), "rtx-4090-5090"),
    (re.compile(r"\b(G?H100|H200|GH200|H800|H20|A100|A800|G?B200|B300)\b"), "h100"),
)


def playbook_for(gpus: Sequence[tuple[str, float]], *, has_mps: bool) -> tuple[Playbook, float | None]:
    """The page of this machine, and the memory of its GPU. gpus: name and bytes of each CUDA device.

    A GPU that no page names gets one by its memory; one too small for any form counts as none.
    """
    for name, memory in sorted(gpus, key=lambda gpu: -gpu[1]):
        for pattern, playbook in _NAMES:
            if pattern.search(name):
                return PLAYBOOKS[playbook], memory
        if memory >= WEIGHTS["bf16"].needed_bytes:
            return PLAYBOOKS["h100"], memory
        if PLAYBOOKS["rtx-4090-5090"].weights_for(memory) is not None:
            return PLAYBOOKS["rtx-4090-5090"], memory
    return PLAYBOOKS["apple-silicon" if has_mps else "cpu"], None


def page_text(playbook: Playbook) -> str:
    """The page: a wheel has a copy (pyproject.toml), an editable installation the tree."""
    inside = resources.files("dgemma") / "data" / "playbooks" / f"{playbook.name}.md"
    if inside.is_file():
        return inside.read_text(encoding="utf-8")
    return (Path(__file__).parents[3] / playbook.page).read_text(encoding="utf-8")


def run_command(playbook: Playbook, weights: Weights) -> str:
    form = "" if weights.format is None else f" --format {weights.format}"
    return f'dgemma run {weights.model} "Why is the sea salty?" --device {playbook.device}{form}'


def commands(playbook: Playbook, weights: Weights) -> list[tuple[str, str]]:
    """What to type on such a machine, in order: what for, and the command."""
    device, model = f"--device {playbook.device}", weights.model
    found = [
        ("Is the machine what you think?", "dgemma doctor"),
        (
            "Are the numbers right on this device? Needs no weights, takes at most two minutes.",
            f"dgemma selfcheck {device} --json > selfcheck.json",
        ),
        ("The first answer.", run_command(playbook, weights)),
    ]
    if weights.format in ("int8", "int4"):
        model = _MADE.format(weights.name)
        command = f"dgemma quantize {EXAMPLE_NAME} {model} --format {weights.format} --no-report"
        found.append(("The same weights in a directory of their own, for the commands below.", command))
    return [
        *found,
        ("Serve it on this machine's port 8000.", f"dgemma serve {model} {device}"),
        (
            "Measure it; ten minutes at most.",
            f"dgemma bench {model} {device} --no-reference --json > bench.json",
        ),
    ]


def efficiency_range(device_class: str) -> tuple[float, float]:
    """The smallest and the largest share of its ceiling that a published speed reached.

    Of the class if two or more speeds are usable there, else of all classes.
    """
    usable = [one for one in PUBLISHED if one.is_usable and one.kind == "diffusion"]
    shares = [(DEVICES[one.device].device_class, one.figure / ceiling(one)) for one in usable]
    of_class = [share for name, share in shares if name == device_class]
    chosen = of_class if len(of_class) > 1 else [share for _, share in shares]
    return min(chosen), max(chosen)
