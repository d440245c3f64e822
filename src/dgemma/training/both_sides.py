"""How well each side of a checkpoint predicts a text: the causal pass, and canvases by their noise.

Verified and lossless decoding rest on the causal pass. Fine-tuning without an encoder loss can spoil it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dgemma.errors import InputError
from dgemma.language_model import LanguageModel
from dgemma.training.data.canvases import CanvasSettings
from dgemma.training.held_out import evaluate_held_out
from dgemma.training.recipe import DataRecipe
from dgemma.training.setup import fill_token, open_stream

MAX_LENGTH = 256
_KEPT = "The causal pass predicts better than a canvas of noise: decode lossless and verified can rest on it."
_LOST = (
    "The causal pass predicts no better than a canvas of noise, so decode lossless and verified will not "
    "write well. Training keeps it with noise.encoder_weight above 0."
)


@dataclass(frozen=True, kw_only=True)
class BothSides:
    """Cross-entropy in nats per token. Canvases have a fifth of all noise levels each."""

    examples: int
    causal: float
    diffusion: float
    diffusion_by_noise: tuple[float | None, ...]

    @property
    def causal_perplexity(self) -> float:
        return math.exp(min(self.causal, 50.0))

    @property
    def kept_causal(self) -> bool | None:
        """Whether the causal pass predicts better than a canvas of noise, which knows the context alone.

        None: there was no canvas of much noise.
        """
        noisy = self.diffusion_by_noise[-1]
        return None if noisy is None else self.causal < noisy

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "causal_perplexity": self.causal_perplexity,
            "kept_causal": self.kept_causal,
        }

    def report(self) -> str:
        bins = len(self.diffusion_by_noise)
        lines = [
            f"causal pass     {self.causal:.3f} nats per token, perplexity {self.causal_perplexity:.1f}",
            f"canvases        {self.diffusion:.3f} nats per token",
        ]
        for number, loss in enumerate(self.diffusion_by_noise):
            if loss is not None:
                lines.append(f"  noise {number / bins:.1f}-{(number + 1) / bins:.1f} {loss:.3f}")
        if self.kept_causal is not None:
            lines.append(_KEPT if self.kept_causal else _LOST)
        return "\n".join(lines)


def measure_both_sides(
    lm: LanguageModel, data: str | Iterable[Any], *, limit: int | None = None, batch: int = 8
) -> BothSides:
    """Both losses on the examples of a file or of records (docs/training-data.md), always the same noise."""
    recipe = DataRecipe(path=data, max_length=MAX_LENGTH) if isinstance(data, str) else None
    stream = open_stream(recipe or DataRecipe(records=data, max_length=MAX_LENGTH), lm, seed=0)
    count = stream.num_records
    if count is None:
        raise InputError.about("data", "is a stream; give a file, or a list of records.")
    settings = CanvasSettings(
        canvas_len=lm.config.canvas_len,
        vocab_size=lm.config.vocab_size,
        fill_token=fill_token(lm),
        # End tokens that fill a canvas are easy, and the causal pass has none.
        supervise_fill=False,
    )
    found = evaluate_held_out(
        lm.transformer,
        stream,
        settings,
        step=0,
        num_examples=count if limit is None else min(limit, count),
        batch_len=batch,
    )
    return BothSides(
        examples=found.examples,
        causal=found.encoder,
        diffusion=found.diffusion,
        diffusion_by_noise=found.diffusion_by_noise,
    )
