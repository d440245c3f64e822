"""Compare both passes on a device with golden tensors of the reference implementation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from dgemma.checkpoint.device import check_device
from dgemma.checkpoint.safetensors_file import read_entries, read_into
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.machine import inspect_machine, package_versions, torch_facts
from dgemma.model.kernels.quantized_matmul import fake_quantize_activations
from dgemma.model.quantized_linear import QuantizedExpertLinear
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind

FP32_LIMIT = 1e-4
# Another device may round differently than the reference on its CPU, but not with a much larger error.
BF16_MARGIN = 1.5
_DTYPES = {"F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
_QUANTIZED_KINDS = (QuantKind.INT4, QuantKind.INT8, QuantKind.FLOAT4)


@dataclass(frozen=True)
class Finding:
    name: str
    dtype: str
    measure: str  # "largest difference", "typical error" or "differing rows"
    found: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.found <= self.limit  # false for NaN


@dataclass(frozen=True)
class Findings:
    device: str
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "device": self.device,
            "seconds": round(self.seconds, 2),
            "findings": [{**asdict(f), "passed": f.passed} for f in self.findings],
            "torch": asdict(torch_facts()),
            "machine": asdict(inspect_machine()),
            "versions": package_versions(),
        }


def check(device: str, dtypes: Sequence[str]) -> Findings:
    """Run every comparison on `device` for each dtype."""
    check_device(device)
    started = time.perf_counter()
    findings: list[Finding] = []
    with (
        resources.as_file(resources.files("dgemma") / "data" / "golden") as golden,
        torch.inference_mode(),
    ):
        tensors = read_tensors(golden / "golden.safetensors")
        facts = json.loads((golden / "golden.json").read_text())
        for dtype in dtypes:
            lm = load(golden / "checkpoint", dtype=dtype, device=device)
            found = _run_passes(lm, tensors, facts["lengths"])
            for name, tensor in found.items():
                result = tensor.float().cpu()
                if dtype == "float32":
                    worst = (result - tensors[name]).abs().max().item()
                    findings.append(Finding(name, dtype, "largest difference", worst, FP32_LIMIT))
                else:
                    typical = typical_error(result, tensors[name])
                    limit = BF16_MARGIN * facts["reference_bf16_error"][name]
                    findings.append(Finding(name, dtype, "typical error", typical, limit))
            findings.append(_exact_rows(lm.exact(), tensors, facts["lengths"], dtype))
            findings += [_quantized_experts(kind, device, lm.dtype) for kind in _QUANTIZED_KINDS]
    return Findings(device, time.perf_counter() - started, tuple(findings))


def report(findings: Findings) -> str:
    """Plain text to paste into an issue."""
    machine, facts = inspect_machine(), torch_facts()
    versions = ", ".join(f"{name} {v}" for name, v in package_versions().items() if v)
    lines = [
        f"dgemma selfcheck on {findings.device}: {'PASSED' if findings.passed else 'FAILED'}",
        f"{machine.system}; {machine.processor}; {', '.join(machine.cpu_features) or '-'}",
        f"torch {facts.version} ({facts.cpu_capability}); "
        f"cuda: {'; '.join(map(str, facts.cuda_devices)) or 'none'}; mps: {'yes' if facts.mps else 'none'}",
        versions,
        "",
        f"{'':<6} {'check':<15} {'dtype':<9} {'measure':<19} {'found':>10} {'limit':>10}",
    ]
    lines += [
        f"{'ok' if f.passed else 'FAILED':<6} {f.name:<15} {f.dtype:<9} {f.measure:<19} "
        f"{f.found:>10.2e} {f.limit:>10.2e}"
        for f in findings.findings
    ]
    lines.append(f"\n{findings.seconds:.1f} seconds")
    return "\n".join(lines)


def typical_error(found: Tensor, truth: Tensor) -> float:
    """The largest median error of a row.

    In bf16 a token near a routing border may get another expert, and then differs much. The median ignores
    a few such tokens, but not a systematic error.
    """
    return (found - truth).abs().flatten(1).median(dim=1).values.max().item()


def _run_passes(lm: LanguageModel, golden: dict[str, Tensor], lengths: Sequence[int]) -> dict[str, Tensor]:
    """Compute the tensors that are recorded as golden, with all rows in one batch."""
    cache = lm.new_cache(batch=len(lengths))
    encoded = lm.encode(golden["prompt"], cache, lengths=lengths)
    first = lm.logits(lm.denoise(golden["canvas"], cache))
    conditioned = lm.logits(lm.denoise(golden["canvas"], cache, lm.soft_embedding(first)))
    lm.encode(golden["commit"], cache)
    after = lm.logits(lm.denoise(golden["canvas"], cache))
    return {"encode": encoded, "first": first, "conditioned": conditioned, "next": after}


def _exact_rows(lm: LanguageModel, golden: dict[str, Tensor], lengths: Sequence[int], dtype: str) -> Finding:
    """Count rows whose bits differ when they run alone: exact execution allows none."""
    together = _run_passes(lm, golden, lengths)["next"]
    differing = 0
    for row, length in enumerate(lengths):
        only = {name: golden[name][row : row + 1] for name in ("prompt", "canvas", "commit")}
        alone = _run_passes(lm, only, [length])["next"]
        differing += not torch.equal(together[row : row + 1].cpu(), alone.cpu())
    return Finding("exact rows", dtype, "differing rows", float(differing), 0.0)


def _quantized_experts(kind: QuantKind, device: str, dtype: torch.dtype) -> Finding:
    """Quantized experts, with the kernel of this device, against their dequantized weights."""
    generator = torch.Generator().manual_seed(0)
    experts, out, inner = 5, 96, 160
    stored = torch.randint(
        256, (experts, out, inner // kind.per_byte), generator=generator, dtype=torch.uint8
    )
    groups = 1 if kind is QuantKind.INT8 else inner // 32
    scale = torch.rand(experts, out, groups, generator=generator).bfloat16()
    quantized = QuantizedTensor(kind, stored.view(kind.stored_as), scale)
    ends = torch.tensor([7, 7, 30, 31, 64], dtype=torch.int32)
    x = torch.randn(int(ends[-1]), inner, generator=generator).to(dtype)
    experts_linear = QuantizedExpertLinear(
        quantized.with_parts({name: part.to(device) for name, part in quantized.parts.items()})
    )
    found = experts_linear.multiply_grouped(x.to(device), ends.to(device)).cpu().double()
    # The CPU kernel quantizes activations.
    kernel = experts_linear.kernel(x.to(device))
    activations = fake_quantize_activations(x) if kernel is not None and kernel.rounds else x
    weights = quantized.dequantize(torch.float32).double()
    pairs = zip(
        weights, activations.double().split(torch.diff(ends, prepend=ends.new_zeros(1)).tolist()), strict=True
    )
    truth = torch.cat([rows @ weight.t() for weight, rows in pairs])
    worst = ((found - truth).abs().max() / truth.abs().max()).item()
    limit = FP32_LIMIT if dtype == torch.float32 else 0.01
    return Finding(
        f"{kind.value} experts", str(dtype).removeprefix("torch."), "largest difference", worst, limit
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All of a small file."""
    tensors = {}
    for entry in read_entries(path):
        tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        read_into(entry, tensor.view(-1).view(torch.uint8).numpy())
        tensors[entry.name] = tensor
    return tensors
