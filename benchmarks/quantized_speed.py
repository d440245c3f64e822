"""Steps with weights in few bits beside bf16, in turn, and beside what the cost model expects.

    python -m benchmarks.quantized_speed                     (--rounds N; --wide for half the released width)

One canvas of 256 tokens, a fixed number of steps, the same prompt for all. `decoded` is int4 without the
kernel: what a CPU without AVX-512 VNNI or a compiler does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.engine_speed import GEOMETRY, HALF_WIDTH, STEPS, ask, made_model, prompts_of
from dgemma.bench.cost_model import ROWS, measure_rates, step_s
from dgemma.bench.timing import spread
from dgemma.checkpoint.quantized.quantization_config import quantization_config_for
from dgemma.checkpoint.quantized.writer import from_checkpoint, write_quantized
from dgemma.checkpoint.source import open_checkpoint
from dgemma.language_model import LanguageModel
from dgemma.loading import load

LENGTH = 32  # of the prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wide", action="store_true", help="half the released width")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        models = make_models(Path(made), args.wide)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        shares: dict[str, list[float]] = {name: [] for name in models}
        rates: dict[str, Any] = {}
        for number in range(args.rounds + 1):
            for name, lm in models.items():
                (answer,) = ask(lm, prompts_of(1, LENGTH, seed=number))
                taken = answer.timings.denoise_s / STEPS
                if not number:  # the first warms up
                    continue
                machine = measure_rates(lm.transformer)
                seconds[name].append(taken)
                shares[name].append(step_s(machine, lm.config, 1, LENGTH) / taken)
                rates[name] = {
                    "product_gflops": {
                        str(r): round(v / 1e9) for r, v in zip(ROWS, machine.product_flops, strict=True)
                    },
                    "expert_gflops": {
                        str(r): round(v / 1e9) for r, v in zip(ROWS, machine.expert_flops, strict=True)
                    },
                }
        findings = {
            name: {
                "megabytes": round(models[name].nbytes / 1e6, 1),
                "seconds_per_step": spread(seconds[name]),
                "share_of_predicted": spread(shares[name]),
                "times_bf16": spread([a / b for a, b in zip(seconds["bf16"], seconds[name], strict=True)]),
                "machine": rates[name],
            }
            for name in models
        }
    print({name: statistics.median(taken) for name, taken in seconds.items()})
    record.write(
        "quantized_speed", {"wide": args.wide, "steps": STEPS, **findings}, "-wide" if args.wide else ""
    )


def make_models(directory: Path, wide: bool) -> dict[str, LanguageModel]:
    plain = directory / "model"
    models = {"bf16": made_model(plain, HALF_WIDTH if wide else GEOMETRY, "bfloat16")}
    for name in ("int8", "int4", "nvfp4"):
        source = open_checkpoint(plain)
        write_quantized(
            directory / name, from_checkpoint(source), quantization_config_for(name, source.config)
        )
        models[name] = load(directory / name)
    models["int4 decoded"] = load(directory / "int4", round_activations=False)
    return models


if __name__ == "__main__":
    main()
