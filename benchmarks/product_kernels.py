"""Our products on a CPU beside torch's: seconds of a step with each kind of weights, in turn.

    python -m benchmarks.product_kernels                     (--rounds N; --wide for half the released width)

One canvas of 256 tokens, a fixed number of steps, the same prompt for all. "torch": the kernel is not used,
so bfloat16 is emulated where the processor lacks it, and quantized weights are dequantized for each product.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from benchmarks import record
from benchmarks.engine_speed import GEOMETRY, HALF_WIDTH, STEPS, ask, made_model, prompts_of
from dgemma.bench.timing import spread
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.checkpoint.quantized.writer import from_checkpoint, write_quantized
from dgemma.checkpoint.source import open_checkpoint
from dgemma.loading import load
from dgemma.model import linear, quantized_linear


@contextmanager
def only_torch() -> Iterator[None]:
    with (
        mock.patch.object(linear, "quantized_matmul", return_value=None),
        mock.patch.object(quantized_linear, "quantized_matmul", return_value=None),
        mock.patch.object(linear, "HAS_BF16_INSTRUCTIONS", True),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wide", action="store_true", help="half the released width")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        plain = Path(made) / "model"
        models = {"bf16": made_model(plain, HALF_WIDTH if args.wide else GEOMETRY, "bfloat16")}
        models["fp32"] = load(plain, dtype="float32")
        models["fp32, exact"] = models["fp32"].exact()
        for name in ("int8", "int4"):
            source = open_checkpoint(plain)
            config = quantization_config_for(name, source.config)
            write_quantized(Path(made) / name, from_checkpoint(source), config)
            models[name] = load(Path(made) / name)
        for number in range(args.rounds + 1):
            prompts = prompts_of(1, 32, seed=number)
            for name, lm in models.items():
                with only_torch():
                    theirs = ask(lm, prompts)[0].timings.denoise_s / STEPS
                ours = ask(lm, prompts)[0].timings.denoise_s / STEPS
                if number:  # the first warms up
                    seconds.setdefault(name, []).append(ours)
                    seconds.setdefault(f"{name}, torch", []).append(theirs)
    base = seconds["bf16, torch"]
    findings = {
        name: {
            "seconds_per_step": spread(values),
            "times_as_fast_as_bf16_by_torch": spread([a / b for a, b in zip(base, values, strict=True)]),
        }
        for name, values in seconds.items()
    }
    suffix = "-wide" if args.wide else ""
    record.write("product_kernels", {"wide": args.wide, "steps": STEPS, **findings}, suffix)


if __name__ == "__main__":
    main()
