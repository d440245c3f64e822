"""Run a case with Google's JAX code: `python run_gemma_jax.py CASE [--without-sliding-mask] [--one-less]`.

Imports nothing of dgemma. A canvas gets its masks from the sampler of `gemma.diffusion`. `skip_sliding_mask`
is always False there, so attention adds the sliding mask of each position; `--without-sliding-mask` leaves
that one out of the canvas pass. `--one-less` lets a canvas see one token less of a long context.

The code has one scalar per layer for both passes, where the checkpoint has two: each pass is given its own.
A generation is one compiled loop that draws by itself: it is not compared.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
arrays: Any = importlib.import_module("safetensors.numpy")
models: Any = importlib.import_module("gemma.diffusion._models")
sampler: Any = importlib.import_module("gemma.diffusion._sampler")
diffusion: Any = importlib.import_module("gemma.diffusion._transformer")
config_module: Any = importlib.import_module("gemma.gm.nn.gemma4._config")
modules: Any = importlib.import_module("gemma.gm.nn.gemma4._modules")
Arrays = dict[str, Any]

NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw2_norm": "pre_feedforward_layernorm",
    "post_ffw2_norm": "post_feedforward_layernorm_1",
    "pre_ffw_norm": "pre_feedforward_layernorm_2",
    "post_ffw1_norm": "post_feedforward_layernorm_2",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class JaxModel:
    """Both passes, with the weights of a checkpoint."""

    def __init__(self, checkpoint: Path, *, has_sliding_mask: bool, one_less: bool) -> None:
        text = json.loads((checkpoint / "config.json").read_text())["text_config"]
        weights: Arrays = {}
        for file in sorted(checkpoint.glob("*.safetensors")):
            weights |= arrays.load_file(file)
        self.window: int = text["sliding_window"] - one_less  # of a canvas
        self.has_sliding_mask = has_sliding_mask
        self.module = models.DiffusionGemma_26B_A4B(config=make_config(text), dtype=jnp.float32)
        self.encoder = make_params(weights, text, "model.encoder.language_model")
        self.decoder = make_params(weights, text, "model.decoder")
        self._encode, self._denoise = jax.jit(self._encode_once), jax.jit(self._denoise_once)

    def new_cache(self, length: int) -> Any:
        return self.module.config.init_cache(1, jnp.float32, cache_length=length)

    def encode(self, tokens: Any, cache: Any, found: Arrays, prefix: str) -> Any:
        """The causal pass -> the longer cache."""
        logits, states, cache = self._encode(tokens, cache)
        keep(found, prefix, logits, states)
        return cache

    def denoise(self, canvas: Any, cache: Any, found: Arrays, prefix: str, previous: Any = None) -> None:
        soft = jnp.zeros((1, canvas.shape[1], self.module.config.embed_dim), jnp.float32)
        if previous is not None:
            soft = self.module.apply(
                {"params": self.decoder}, previous, method=lambda module, x: module.embedder.encode_logits(x)
            )
        with self._masks():
            logits, states, _ = self._denoise(canvas, cache, soft)
        keep(found, prefix, logits, states)

    def _encode_once(self, tokens: Any, cache: Any) -> Any:
        past, count, length = sizes(tokens, cache)
        mask = sampler._make_causal_attention_mask(1, count, length, past)
        return self._apply(self.encoder, tokens=tokens, cache=cache, attention_mask=mask)

    def _denoise_once(self, canvas: Any, cache: Any, soft: Any) -> Any:
        past, count, length = sizes(canvas, cache)
        return self._apply(
            self.decoder,
            tokens=canvas,
            cache=cache,
            sc_embeddings=soft,
            attention_mask=sampler._make_global_attention_mask(1, count, length, past),
            sliding_attention_mask=sampler._make_block_local_attention_mask(
                1, count, self.window, length, past
            ),
            method=diffusion.DiffusionMixin.call_with_self_conditioning,
        )

    def _masks(self) -> AbstractContextManager[Any]:
        if self.has_sliding_mask:
            return nullcontext()
        return mock.patch.object(modules, "_create_sliding_mask", return_value=True)

    def _apply(self, params: Any, *, tokens: Any, cache: Any, **options: Any) -> Any:
        """-> logits, what each layer returns, the cache."""
        past, count, _ = sizes(tokens, cache)
        out, kept = self.module.apply(
            {"params": params},
            tokens=tokens,
            cache=cache,
            positions=past[:, None] + jnp.arange(count)[None],
            **options,
            mutable=["intermediates"],
            capture_intermediates=lambda module, _: isinstance(module, modules.Block),
        )
        found = [
            kept["intermediates"][f"layer_{number}"]["__call__"][0][1]
            for number in range(self.module.config.num_layers)
        ]
        return out.logits, found, out.cache


def sizes(tokens: Any, cache: Any) -> tuple[Any, int, int]:
    """-> the tokens in the cache, the tokens after them, and the room in the cache."""
    layer = cache["layer_0"]
    return layer["end_index"], tokens.shape[1], layer["k"].shape[1]


def keep(found: Arrays, prefix: str, logits: Any, states: Sequence[Any]) -> None:
    for number, hidden in enumerate(states):
        found[f"{prefix}/hidden.{number}"] = hidden[0]
    found[f"{prefix}/logits"] = logits[0]


def make_config(text: dict[str, Any]) -> Any:
    kinds = {"sliding_attention": modules.AttentionType.LOCAL_SLIDING}
    sliding, full = (text["rope_parameters"][kind] for kind in ("sliding_attention", "full_attention"))
    return config_module.TransformerConfig(
        num_embed=text["vocab_size"],
        embed_dim=text["hidden_size"],
        hidden_dim=text["intermediate_size"],
        num_heads=text["num_attention_heads"],
        head_dim=text["head_dim"],
        num_kv_heads=text["num_key_value_heads"],
        final_logit_softcap=text["final_logit_softcapping"],
        num_global_kv_heads=text["num_global_key_value_heads"],
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=tuple(kinds.get(kind, modules.AttentionType.GLOBAL) for kind in text["layer_types"]),
        global_key_size=text["global_head_dim"],
        k_eq_v_global=True,
        global_rope_proportion=full["partial_rotary_factor"],
        local_rope_proportion=1.0,
        sliding_window_size=text["sliding_window"],
        local_base_frequency=sliding["rope_theta"],
        global_base_frequency=full["rope_theta"],
        enable_moe=True,
        num_experts=text["num_experts"],
        expert_dim=text["moe_intermediate_size"],
        top_k_experts=text["top_k_experts"],
        moe_dense_hidden_dim=text["intermediate_size"],
    )


def make_params(weights: Arrays, text: dict[str, Any], scalars: str) -> Any:
    """The tree of parameters, with the layer scalars of one pass."""
    own = "model.decoder"
    tree: Arrays = {
        "embedder": {"input_embedding": weights[f"{own}.embed_tokens.weight"]},
        "final_norm": {"scale": weights[f"{own}.norm.weight"]},
        "self_conditioner": {
            "pre_norm": {"scale": weights[f"{own}.self_conditioning.pre_norm.weight"]},
            "ffw": make_mlp(weights, f"{own}.self_conditioning"),
        },
    }
    for number, kind in enumerate(text["layer_types"]):
        layer = f"{own}.layers.{number}"
        tree[f"layer_{number}"] = {
            "skip_scale": weights[f"{scalars}.layers.{number}.layer_scalar"],
            "attn": make_attention(weights, f"{layer}.self_attn", text, is_full=kind == "full_attention"),
            "mlp2": make_mlp(weights, f"{layer}.mlp"),
            "mlp": make_experts(weights, layer),
            **{ours: {"scale": weights[f"{layer}.{theirs}.weight"]} for ours, theirs in NORMS.items()},
        }
    return jax.tree.map(jnp.asarray, tree)


def make_attention(weights: Arrays, prefix: str, text: dict[str, Any], *, is_full: bool) -> Arrays:
    size = text["global_head_dim" if is_full else "head_dim"]

    def heads(name: str) -> Any:
        """[heads, hidden, size]"""
        matrix = weights[f"{prefix}.{name}_proj.weight"]
        return matrix.reshape(-1, size, matrix.shape[1]).transpose(0, 2, 1)

    out = weights[f"{prefix}.o_proj.weight"]
    return {
        "q_einsum": {"w": heads("q")},
        "attn_vec_einsum": {"w": out.reshape(out.shape[0], -1, size).transpose(1, 2, 0)},
        "query_norm": {"scale": weights[f"{prefix}.q_norm.weight"]},
        "key_norm": {"scale": weights[f"{prefix}.k_norm.weight"]},
        **(
            {"k_einsum": {"w": heads("k")}}
            if is_full
            else {"kv_einsum": {"w": jnp.stack([heads("k"), heads("v")])}}
        ),
    }


def make_mlp(weights: Arrays, prefix: str) -> Arrays:
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {"gating_einsum": jnp.stack([gate, up]), "linear": down.T}


def make_experts(weights: Arrays, layer: str) -> Arrays:
    gate_up = weights[f"{layer}.experts.gate_up_proj"]  # [experts, 2 * width, hidden]
    return {
        "router_logits": {"w": weights[f"{layer}.router.proj.weight"].T},
        "router_scale": weights[f"{layer}.router.scale"],
        "per_expert_scale": weights[f"{layer}.router.per_expert_scale"],
        "gating_einsum": {"w": gate_up.reshape(len(gate_up), 2, -1, gate_up.shape[2])},
        "linear": {"w": weights[f"{layer}.experts.down_proj"].transpose(0, 2, 1)},
    }


def run(model: JaxModel, inputs: Arrays, plan: dict[str, Any]) -> Arrays:
    found: Arrays = {}
    for length in plan["contexts"]:
        prompt, canvas, second, commit, previous = (
            jnp.asarray(inputs[f"{length}/{name}"])[None]
            for name in ("prompt", "canvas", "second", "commit", "previous")
        )
        cache = model.new_cache(max(plan["contexts"]) + 2 * canvas.shape[1])  # one shape, compiled once
        cache = model.encode(prompt, cache, found, f"{length}/prompt")
        model.denoise(canvas, cache, found, f"{length}/canvas")
        model.denoise(second, cache, found, f"{length}/conditioned", previous)
        cache = model.encode(commit, cache, found, f"{length}/commit")
        model.denoise(canvas, cache, found, f"{length}/next")
    return found | run_step(inputs, plan)


def run_step(inputs: Arrays, plan: dict[str, Any]) -> Arrays:
    """The temperature of a first step, the acceptance and the renoising, on given logits and draws."""
    options = plan["generation"]
    shaper = sampler.AnnealingTemperatureShaperConfig(
        max_temperature=options["t_max"], min_temperature=options["t_min"]
    ).make()
    logits, drawn, noise, canvas = (
        jnp.asarray(inputs[f"step/{name}"])[None] for name in ("logits", "drawn", "noise", "before")
    )
    shaped = shaper(logits, jnp.ones(1))
    accept = sampler.SampleFromPredictions(
        entropy_bound=options["entropy_bound"], text_vocab_size=logits.shape[-1]
    )
    with (
        mock.patch.object(jax.random, "categorical", return_value=drawn),
        mock.patch.object(jax.random, "randint", return_value=noise),
    ):
        after = accept(
            rng=jax.random.key(0), denoiser_logits=shaped, canvas=canvas,
            current_noise_proportion=jnp.ones(1), target_noise_proportion=jnp.ones(1),
        )  # fmt: skip
    return {"step/argmax": shaped.argmax(-1)[0], "step/canvas": after[0]}


def main() -> None:
    case = Path(sys.argv[1])
    with jax.default_matmul_precision("highest"):
        model = JaxModel(
            case / "checkpoint",
            has_sliding_mask="--without-sliding-mask" not in sys.argv,
            one_less="--one-less" in sys.argv,
        )
        plan = json.loads((case / "plan.json").read_text())
        found = run(model, arrays.load_file(case / "inputs.safetensors"), plan)
    host = {name: jax.device_get(array) for name, array in found.items()}
    arrays.save_file(
        {
            name: array.astype("int64" if name.startswith("step") else "float32")
            for name, array in host.items()
        },
        case / "outputs.safetensors",
    )


if __name__ == "__main__":
    main()
