"""Timings of the reference implementation (Transformers) on the same weights."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The reference requires a vision tower of half a billion parameters; a tiny one replaces it.
_TINY_VISION = {
    "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
}  # fmt: skip


def load_reference(model: Path, dtype: torch.dtype) -> Any:
    """`DiffusionGemmaForBlockDiffusion` from the same directory, or None if Transformers does not have it."""
    try:
        from transformers import DiffusionGemmaForBlockDiffusion
        from transformers.utils import logging as transformers_logging
    except ImportError:
        return None
    logging: Any = transformers_logging
    logging.set_verbosity_error()  # it would report the missing vision tower
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        for file in model.iterdir():
            (Path(scratch) / file.name).symlink_to(file.resolve())
        config = json.loads((model / "config.json").read_text()) | {"vision_config": _TINY_VISION}
        (Path(scratch) / "config.json").unlink()
        (Path(scratch) / "config.json").write_text(json.dumps(config))
        load: Any = DiffusionGemmaForBlockDiffusion.from_pretrained
        # The vision tower of a checkpoint has another size than the tiny one.
        reference, info = load(scratch, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True)
    differing = [
        str(key) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in info[kind]
    ]
    assert all("vision" in key for key in differing), f"the reference is not on the same weights: {differing}"
    return reference.eval()


@dataclass(frozen=True)
class ReferenceTimes:
    step_s: float
    commit_s: float | None  # None: a single canvas has no commit
    total_s: float
    num_tokens: int


class TimedReference:
    """The reference model, with a timer around its encoder."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._encoder_s: list[float] = []
        encode = model.model.encoder.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = encode(*args, **kwargs)
            self._encoder_s.append(time.perf_counter() - started)
            return result

        model.model.encoder.forward = timed

    def diffuse(self, prompt: torch.Tensor, canvases: int, steps: int) -> ReferenceTimes:
        """Generate canvases of exactly `steps` steps: the stopping rule never applies."""
        self._encoder_s.clear()
        started = time.perf_counter()
        answer = self.model.generate(
            input_ids=prompt,
            max_new_tokens=canvases * self.model.config.canvas_length,
            max_denoising_steps=steps,
            stability_threshold=steps,
            eos_token_id=[self.model.config.text_config.vocab_size],  # no token has this id
        )
        total_s = time.perf_counter() - started
        commits = self._encoder_s[1:]
        return ReferenceTimes(
            step_s=(total_s - sum(self._encoder_s)) / (canvases * steps),
            commit_s=sum(commits) / len(commits) if commits else None,
            total_s=total_s,
            num_tokens=answer.sequences.shape[1] - prompt.shape[1],
        )

    @torch.inference_mode()
    def causal(self, prompt: torch.Tensor, num_tokens: int) -> float:
        """Seconds per token of greedy causal decoding with the encoder and the head."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config.text_config)
        hidden = self.model.model.encoder(input_ids=prompt, past_key_values=cache).last_hidden_state
        started = time.perf_counter()
        for _ in range(num_tokens):
            token = self.model.lm_head(hidden[:, -1:]).argmax(-1)
            hidden = self.model.model.encoder(input_ids=token, past_key_values=cache).last_hidden_state
        return (time.perf_counter() - started) / num_tokens
