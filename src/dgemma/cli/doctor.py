"""Report this machine's processor, memory and devices, and what they mean for running models.

At the end: the playbook for such a machine, a page of the documentation, and the first command to type. The
page comes with the package: --playbook prints it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from dgemma.bench.playbooks import Playbook, page_text, playbook_for
from dgemma.machine import MachineFacts, TorchFacts, inspect_machine, package_versions, torch_facts

EXAMPLES = "examples:\n  dgemma doctor --json\n  dgemma doctor --playbook | less"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print one JSON object for a program")
    shown.add_argument("--playbook", action="store_true", help="print this machine's page")


def run(args: argparse.Namespace) -> int:
    from dgemma.kernels.kernel_cache import find_compiler
    from dgemma.model.kernels.quantized_matmul import unavailable_reason

    machine, torch, versions = inspect_machine(), torch_facts(), package_versions()
    start = first_step(machine, torch)
    if args.playbook:
        print(page_text(start.playbook), end="")
        return 0
    no_kernel = unavailable_reason()
    advice = what_it_means(machine, torch, no_kernel, has_compiler=find_compiler() is not None)
    if args.json:
        print(
            json.dumps(
                {
                    "machine": asdict(machine),
                    "torch": asdict(torch),
                    "quantized_kernel": no_kernel is None,
                    "versions": versions,
                    "advice": advice,
                    "playbook": {
                        "name": start.playbook.name, "page": start.playbook.page, "command": start.command,
                    },
                },
                indent=2,
            )
        )  # fmt: skip
        return 0
    rows = {
        "system": machine.system,
        "processor": machine.processor,
        "cores": str(machine.cores),
        "cpu features": ", ".join(machine.cpu_features) or "none that matter",
        "memory": f"{machine.memory_bytes / 1e9:.1f} GB, {machine.available_bytes / 1e9:.1f} GB free",
        "torch": f"{torch.version}, {torch.threads} threads, {torch.cpu_capability}",
        "cuda": "; ".join(map(str, torch.cuda_devices)) or "none",
        "mps": "yes" if torch.mps else "none",
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
    }
    for name, value in rows.items():
        print(f"{name:<14}{value}")
    print("\nwhat that means")
    for line in advice:
        print(f"- {line}")
    print(f"\nplaybook: {start.playbook.title} ({start.playbook.page}; `dgemma doctor --playbook` prints it)")
    print(f"{start.why}; type:\n  {start.command}")
    return 0


@dataclass(frozen=True)
class FirstStep:
    playbook: Playbook
    why: str
    command: str


def first_step(machine: MachineFacts, torch: TorchFacts) -> FirstStep:
    """Which page this machine should follow, and what to type first."""
    gpus = [(gpu.name, gpu.memory_bytes) for gpu in torch.cuda_devices]
    playbook, memory = playbook_for(gpus, has_mps=torch.mps)
    available = machine.available_bytes if memory is None else memory
    weights = playbook.weights_for(available, machine.cores)
    if weights is not None:
        why = f"the released model fits as {weights.name} ({weights.num_bytes / 1e9:.1f} GB)"
    elif machine.cores < playbook.min_cores:
        why = f"the released model would take minutes for a canvas on {machine.cores} cores"
    else:
        why = f"the released model does not fit into {available / 1e9:.1f} GB"
    return FirstStep(playbook, why, playbook.first_command(available, machine.cores))


def what_it_means(
    machine: MachineFacts, torch: TorchFacts, no_kernel: str | None, *, has_compiler: bool
) -> list[str]:
    """Plain advice, each line from one fact. no_kernel: why quantized products cannot run here."""
    advice = []
    if torch.cuda_devices:
        advice.append("CUDA is there: load with device='cuda', dtype='bfloat16'.")
    elif torch.mps:
        advice.append("Apple's GPU is there: load with device='mps', dtype='bfloat16'.")
    else:
        advice.append("No GPU: models run on the CPU.")
    if torch.cuda_devices or torch.mps:
        advice.append(
            "dgemma's authors have no such device: please run `dgemma selfcheck` on it and send us "
            "the report."
        )
    if "amx_bf16" in machine.cpu_features:
        advice.append("The CPU multiplies bf16 in hardware (AMX): use dtype='bfloat16'.")
    elif "avx512_bf16" in machine.cpu_features:
        advice.append("The CPU has bf16 instructions (AVX-512): use dtype='bfloat16'.")
    elif machine.cpu_features:
        advice.append(
            "The CPU has no bf16 instructions: dtype='auto' loads bf16 weights in float32 where they fit."
        )
    if no_kernel is None and "avx512_vnni" not in machine.cpu_features:
        advice.append(
            "int8, int4 and NVFP4 weights are decoded in the registers of each product here (AVX-512): "
            "`dgemma quantize` saves memory, and time against bfloat16."
        )
    elif no_kernel is None:
        advice.append(
            "Products run on the codes of int8, int4 and NVFP4 weights here (AVX-512 VNNI): "
            "`dgemma quantize` saves memory and time."
        )
    else:
        advice.append(
            f"Quantized weights are decoded for each product on this CPU ({no_kernel}): they save memory, "
            "not time."
        )
    if "avx2" in machine.cpu_features and not has_compiler:
        advice.append(
            "Install a C++ compiler (g++): with it, steps on the CPU take about two thirds of the time."
        )
    largest = max(0, machine.available_bytes - 2_000_000_000)
    advice.append(
        f"Free memory holds about {largest / 2e9:.1f} B parameters in bf16 "
        f"(the released model has 25.2 B, 50 GB)."
    )
    if torch.threads > machine.cores:
        advice.append(f"torch uses {torch.threads} threads on {machine.cores} cores: set OMP_NUM_THREADS.")
    return advice
