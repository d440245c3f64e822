"""Run a case with mlx-vlm: `python run_mlx.py CASE`. Imports nothing of dgemma.

Its sampler is one with its loop, and draws by itself: steps and generations are not compared.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

mx: Any = importlib.import_module("mlx.core")
language: Any = importlib.import_module("mlx_vlm.models.diffusion_gemma.language")
Arrays = dict[str, Any]


def load(case: Path) -> Any:
    utils: Any = importlib.import_module("mlx_vlm.utils")
    return utils.load_model(case / "checkpoint", lazy=False, strict=False)  # no vision tower


def run(model: Any, inputs: Arrays, plan: dict[str, Any]) -> Arrays:
    found: Arrays = {}
    for length in plan["contexts"]:
        given = {name: inputs[f"{length}/{name}"][None] for name in ("prompt", "canvas", "second", "commit")}
        previous = inputs[f"{length}/previous"][None]
        cache = model.make_cache()
        with hidden(found, f"{length}/prompt"):
            states, cache = model.model.encoder(given["prompt"], cache=cache)
        found[f"{length}/prompt/logits"] = logits(model, states)
        with hidden(found, f"{length}/canvas"):
            states = model.model.decoder(given["canvas"], cache=cache)
        found[f"{length}/canvas/logits"] = logits(model, states)
        with hidden(found, f"{length}/conditioned"):
            states = model.model.decoder(given["second"], cache=cache, self_conditioning_logits=previous)
        found[f"{length}/conditioned/logits"] = logits(model, states)
        with hidden(found, f"{length}/commit"):
            states, cache = model.model.encoder(given["commit"], cache=cache)
        found[f"{length}/commit/logits"] = logits(model, states)
        with hidden(found, f"{length}/next"):
            states = model.model.decoder(given["canvas"], cache=cache)
        found[f"{length}/next/logits"] = logits(model, states)
    return found


def logits(model: Any, states: Any) -> Any:
    return model._softcap(model.model.decoder.embed_tokens.as_linear(states))[0]


@contextmanager
def hidden(found: Arrays, prefix: str) -> Iterator[None]:
    """Record what each layer returns, in the order in which they are called."""
    kind = language.DecoderLayer
    call, number = kind.__call__, 0

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        out = call(self, *args, **kwargs)
        found[f"{prefix}/hidden.{number}"] = (out[0] if isinstance(out, tuple) else out)[0]
        number += 1
        return out

    kind.__call__ = keep
    try:
        yield
    finally:
        kind.__call__ = call


def main() -> None:
    case = Path(sys.argv[1])
    model = load(case)
    found = run(
        model, dict(mx.load(str(case / "inputs.safetensors"))), json.loads((case / "plan.json").read_text())
    )
    mx.save_safetensors(
        str(case / "outputs.safetensors"), {name: array.astype(mx.float32) for name, array in found.items()}
    )


if __name__ == "__main__":
    main()
