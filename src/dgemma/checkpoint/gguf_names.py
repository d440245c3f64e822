"""The names of this architecture in GGUF files. Imports no torch.

They are PROVISIONAL: those of llama.cpp pull request 24423, which is open. Files that people share have them.
When the pull request changes, this table changes; reading, writing and refusing use it.
"""

from __future__ import annotations

ARCHITECTURE = "diffusion-gemma"

# Released name without its prefix -> name in GGUF.
_OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "self_conditioning.pre_norm.weight": "self_cond_pre_norm.weight",
    "self_conditioning.gate_proj.weight": "self_cond_gate.weight",
    "self_conditioning.up_proj.weight": "self_cond_up.weight",
    "self_conditioning.down_proj.weight": "self_cond_down.weight",
}
_OF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
}
_ENCODER_SCALAR = "enc_layer_output_scale.weight"
# Converters of other models of the family write gate and up projections of all experts as two tensors.
_HALVES = ("ffn_gate_exps.weight", "ffn_up_exps.weight")

ROPE_FREQUENCIES = "rope_freqs.weight"  # 1 for the dimensions that rotate, 1e30 for the others
NOT_ROTATED = 1e30
HEAD = "output.weight"  # a copy of the embedding, if it is there

# Metadata. Keys of the geometry begin with the architecture; see `gguf_source.py`.
TOKENIZER_JSON = "tokenizer.huggingface.json"
CHAT_TEMPLATE = "tokenizer.chat_template"
CANVAS_LENGTH = "diffusion.canvas_length"
# In generation_config.json -> in GGUF.
SAMPLER_KEYS = {
    "max_denoising_steps": "diffusion.eb_max_steps",
    "t_min": "diffusion.eb_t_min",
    "t_max": "diffusion.eb_t_max",
    "entropy_bound": "diffusion.eb_entropy_bound",
    "stability_threshold": "diffusion.eb_stability_threshold",
    "confidence_threshold": "diffusion.eb_confidence_threshold",
}


def gguf_name(name: str) -> str:
    """The name in GGUF of a tensor of the released layout (the first of its names)."""
    prefix = "model.decoder."
    if not name.startswith(prefix):  # the one tensor per layer that the encoder does not share
        return f"blk.{name.split('.')[4]}.{_ENCODER_SCALAR}"
    rest = name.removeprefix(prefix)
    if rest in _OUTER:
        return _OUTER[rest]
    _, layer, suffix = rest.split(".", 2)
    return f"blk.{layer}.{_OF_LAYER[suffix]}"


def halves_of(name: str) -> tuple[str, ...]:
    """The names of a fused projection's two halves, where they are stored apart: gate, then up."""
    whole = _OF_LAYER["experts.gate_up_proj"]
    return tuple(name.replace(whole, half) for half in _HALVES) if name.endswith(whole) else ()
