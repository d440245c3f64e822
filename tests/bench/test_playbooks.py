"""Which playbook a machine gets, and that what it says to type exists and fits."""

from __future__ import annotations

import shlex

import pytest

from dgemma.bench.devices import DEVICES
from dgemma.bench.playbooks import (
    BUNDLED_COMMAND,
    EXTRA_BYTES,
    PLAYBOOKS,
    WEIGHTS,
    commands,
    efficiency_range,
    playbook_for,
)
from dgemma.bench.predict import EFFICIENCY
from dgemma.cli.main import build_parser
from dgemma.machine import torch_facts


@pytest.mark.parametrize(
    ("gpus", "expected", "memory"),
    [
        ([("NVIDIA H100 80GB HBM3", 85e9)], "h100", 85e9),
        ([("NVIDIA GH200 480GB", 102e9)], "h100", 102e9),
        ([("NVIDIA A100-SXM4-80GB", 85e9)], "h100", 85e9),
        ([("NVIDIA GB300", 288e9)], "dgx-station", 288e9),
        ([("NVIDIA GB10", 128e9)], "dgx-spark", 128e9),
        ([("NVIDIA GeForce RTX 5090", 34e9)], "rtx-4090-5090", 34e9),
        ([("NVIDIA GeForce RTX 4090 Laptop GPU", 17e9)], "rtx-4090-5090", 17e9),
        ([("NVIDIA RTX PRO 6000 Blackwell", 102e9)], "h100", 102e9),  # by memory, like the next two
        ([("NVIDIA GeForce RTX 3090", 25e9)], "rtx-4090-5090", 25e9),
        ([("NVIDIA GeForce RTX 3060", 12e9)], "cpu", None),
        ([("NVIDIA GeForce RTX 3060", 12e9), ("NVIDIA GeForce RTX 5090", 34e9)], "rtx-4090-5090", 34e9),
        ([], "cpu", None),
    ],
)
def test_a_gpu_gets_its_page_by_name_and_then_by_memory(
    gpus: list[tuple[str, float]], expected: str, memory: float | None
) -> None:
    assert playbook_for(gpus, has_mps=False) == (PLAYBOOKS[expected], memory)


def test_a_mac_gets_the_page_of_macs() -> None:
    assert playbook_for([], has_mps=True) == (PLAYBOOKS["apple-silicon"], None)


def test_this_machine_gets_a_page() -> None:
    facts = torch_facts()
    gpus = [(gpu.name, gpu.memory_bytes) for gpu in facts.cuda_devices]
    assert playbook_for(gpus, has_mps=facts.mps)[0].name in PLAYBOOKS


@pytest.mark.parametrize("playbook", PLAYBOOKS.values(), ids=lambda one: one.name)
def test_the_first_weights_fit_each_device_of_the_page(playbook) -> None:  # type: ignore[no-untyped-def]
    for name in playbook.devices:
        found = playbook.weights_for(DEVICES[name].memory_bytes)
        assert found is WEIGHTS[playbook.weights[0]]


@pytest.mark.parametrize("playbook", PLAYBOOKS.values(), ids=lambda one: one.name)
def test_what_the_page_says_to_type_exists(playbook) -> None:  # type: ignore[no-untyped-def]
    parser = build_parser()
    for weights in playbook.weights:
        for _, command in commands(playbook, WEIGHTS[weights]):
            name, *argv = shlex.split(command.partition(" > ")[0])
            assert name == "dgemma"
            parsed = parser.parse_args(argv)
            assert getattr(parsed, "device", playbook.device) == playbook.device


def test_a_machine_with_too_little_memory_or_too_few_cores_gets_the_bundled_model() -> None:
    cpu = PLAYBOOKS["cpu"]
    enough = WEIGHTS["int4"].num_bytes + EXTRA_BYTES
    assert cpu.first_command(enough, 8) != BUNDLED_COMMAND
    assert cpu.first_command(enough - 1, 8) == BUNDLED_COMMAND
    assert cpu.first_command(enough, 7) == BUNDLED_COMMAND
    mac = PLAYBOOKS["apple-silicon"]  # the GPU may use three quarters
    assert mac.weights_for(enough / 0.75 + 1) is WEIGHTS["int4"]
    assert mac.weights_for(enough / 0.75 - 1) is None


def test_the_range_spans_the_efficiency_and_is_that_of_all_where_little_is_published() -> None:
    everything = efficiency_range("cpu")
    assert efficiency_range("unified memory") == everything  # one figure is no range
    for name, efficiency in EFFICIENCY.items():
        low, high = efficiency_range(name)
        assert everything[0] <= low <= efficiency <= high <= everything[1]
    assert efficiency_range("consumer gpu")[0] > everything[0]
