"""How a denoising step grows with context, concurrency and canvas: measured, and the cost model's beside it.

    python -m benchmarks.growth              (--rounds N)

13 M parameters, so that 262,144 tokens of context fit the time of a person. The past is random keys and
values: reading them costs what real ones cost. Each point runs in turn with the first of its curve, and the
figure is their ratio. The prediction is `cost_model.step_s` with this machine's rates.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.engine_speed import made_model
from dgemma.bench.cost_model import MachineRates, measure_rates, step_s
from dgemma.bench.timing import alternate, ratios, spread
from dgemma.checkpoint.presets import PRESETS
from dgemma.model.kv_cache import KVCache, NewKeysValues
from dgemma.model.transformer import Transformer
from dgemma.sampling.rng import noise_key
from dgemma.sampling.vocab_scan import scan_vocab

CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144)
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
CANVASES = (64, 128, 192, 256)
GEOMETRY = replace(PRESETS["small"].config, canvas_len=256, window=1024, max_positions=2 * 262_144)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        model = made_model(Path(made) / "model", GEOMETRY, "float32").transformer
    rates = measure_rates(model)
    curves = {
        "context": {n: (model, 1, n) for n in CONTEXTS},
        "concurrency": {n: (model, n, 1024) for n in CONCURRENCY},
        "canvas": {n: (model.with_lengths(canvas_len=n), 1, 1024) for n in CANVASES},
    }
    findings: dict[str, Any] = {"geometry": "preset small, canvas 256, window 1,024; 1 of 6 layers is full"}
    for name, points in curves.items():
        findings[name] = curve(rates, points, args.rounds)
        print(name, findings[name], flush=True)
    record.write("growth", findings)


Point = tuple[Transformer, int, int]  # the model, answers at once, context


def curve(rates: MachineRates, points: dict[int, Point], rounds: int) -> list[dict[str, Any]]:
    """Each point in turn with the first."""
    (first, base), *others = points.items()
    base_s = predicted_s(rates, base)
    rows: list[dict[str, Any]] = []
    for at, point in others:
        seconds = alternate({"base": one_step(*base), "point": one_step(*point)}, rounds)
        if not rows:
            rows.append({"at": first, "seconds": spread(seconds["base"]), "predicted_s": base_s})
        rows.append(
            {
                "at": at,
                "seconds": spread(seconds["point"]),
                "predicted_s": predicted_s(rates, point),
                "times_the_first": ratios(seconds, "base")["point"],
                "times_the_first_predicted": predicted_s(rates, point) / base_s,
            }
        )
    return rows


def predicted_s(rates: MachineRates, point: Point) -> float:
    model, canvases, context = point
    return step_s(rates, model.config, canvases, context)


def one_step(model: Transformer, canvases: int, context: int) -> Callable[[], object]:
    """A denoising step, from canvas to scanned vocabulary, of so many canvases after random pasts."""
    config, dtype = model.config, model.embedding.dtype
    cache = KVCache(config, 1, dtype=dtype, device=torch.device("cpu"), capacity=context)
    past = tuple(torch.randn(1, context, s.num_kv_heads, s.head_dim) for s in config.layers)
    cache.append(NewKeysValues(past, past), [context])
    cache = cache.select([0] * canvases)
    canvas = torch.randint(config.vocab_size, (canvases, config.canvas_len))
    soft = torch.randn(canvases, config.canvas_len, config.hidden_size)
    key = noise_key(list(range(canvases)), [0] * canvases, [0] * canvases, canvas.device)
    temperature = torch.ones(canvases)

    @torch.inference_mode()
    def run() -> object:
        hidden = model.denoise(canvas, cache.context(), soft)
        return scan_vocab(hidden, model.head, temperature, key)

    return run


if __name__ == "__main__":
    main()
