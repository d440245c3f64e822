"""Write the golden checkpoint and tensors of `dgemma selfcheck` from the reference.

python -m tools.make_golden        (needs the dev extra: transformers is the reference)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaTextConfig,
    DynamicCache,
)

from dgemma.checkpoint.names import tensor_specs
from dgemma.checkpoint.safetensors_file import TensorToWrite
from dgemma.checkpoint.save import write_checkpoint
from dgemma.model.config import ModelConfig
from dgemma.selfcheck import typical_error

OUT = Path(__file__).parent.parent / "src" / "dgemma" / "data" / "golden"
LENGTHS = (37, 5, 16, 60)  # around and beyond the window of 16


def make_oracle() -> DiffusionGemmaForBlockDiffusion:
    torch.manual_seed(0)
    text = DiffusionGemmaTextConfig(
        vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        num_global_key_value_heads=1, sliding_window=16, num_experts=8, top_k_experts=2,
        moe_intermediate_size=24, max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(text_config=text, canvas_length=16))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "vision" in name or "inv_freq" in name or "embed_scale" in name:
                continue
            if name.endswith("q_norm.weight"):
                tensor.uniform_(0.15, 0.45)
            elif name.endswith("layer_scalar") or tensor.ndim == 1:
                tensor.uniform_(0.7, 1.3)
            else:
                tensor.normal_(0, 0.2 if "embed" not in name else 0.5)
            if name.endswith("router.proj.weight"):
                tensor.mul_(8)
            # Calm residual branches: rounding stays far below the limits on every device.
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                tensor.mul_(0.3)
            if name.endswith("self_conditioning.down_proj.weight"):
                tensor.mul_(0.1)
            # Exact in bf16, so that one file serves both dtypes.
            tensor.copy_(tensor.bfloat16().float())
    return model.eval()


def life(model: DiffusionGemmaForBlockDiffusion, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Prompt, first step, self-conditioned step, commit, next step; row by row, unpadded."""
    found: dict[str, list[Tensor]] = {"encode": [], "first": [], "conditioned": [], "next": []}
    for row, length in enumerate(LENGTHS):
        canvas = inputs["canvas"][row : row + 1]
        cache = DynamicCache(config=model.config.text_config)
        first = model(
            input_ids=inputs["prompt"][row : row + 1, :length],
            decoder_input_ids=canvas,
            past_key_values=cache,
        )
        conditioned = model(
            decoder_input_ids=canvas,
            past_key_values=cache,
            self_conditioning_logits=first.logits.to(model.dtype),  # as its generate does
        )
        after = model(
            input_ids=inputs["commit"][row : row + 1], decoder_input_ids=canvas, past_key_values=cache
        )
        hidden = first.encoder_last_hidden_state
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, max(LENGTHS) - length))
        for name, tensor in (
            ("encode", padded),
            ("first", first.logits),
            ("conditioned", conditioned.logits),
            ("next", after.logits),
        ):
            found[name].append(tensor.float())
    return {name: torch.cat(tensors) for name, tensors in found.items()}


@torch.no_grad()
def main() -> None:
    oracle = make_oracle()
    config = ModelConfig.from_json(oracle.config.to_dict())
    state = oracle.state_dict()
    shutil.rmtree(OUT, ignore_errors=True)
    raw = config.to_json()
    raw["dtype"] = "bfloat16"
    tensors = [
        TensorToWrite(
            spec.name,
            "BF16",
            spec.shape,
            lambda t=state[spec.name]: [t.bfloat16().contiguous().view(torch.uint8).numpy()],
        )
        for spec in tensor_specs(config)
    ]
    write_checkpoint(OUT / "checkpoint", raw, tensors, max_shard_bytes=1 << 40)
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> Tensor:
        return torch.randint(config.vocab_size, (len(LENGTHS), length), generator=generator)

    inputs = {"prompt": ids(max(LENGTHS)), "canvas": ids(16), "commit": ids(16)}
    truth = life(oracle, inputs)
    oracle.save_pretrained(OUT / "tmp")
    narrow = DiffusionGemmaForBlockDiffusion.from_pretrained(OUT / "tmp", dtype=torch.bfloat16)
    shutil.rmtree(OUT / "tmp")
    rounded = life(narrow.eval(), inputs)
    error = {name: typical_error(rounded[name], truth[name]) for name in truth}
    small = {name: tensor.to(torch.int32) for name, tensor in inputs.items()}
    save_file({**small, **truth}, OUT / "golden.safetensors")
    facts = {"lengths": LENGTHS, "reference_bf16_error": error}
    (OUT / "golden.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
