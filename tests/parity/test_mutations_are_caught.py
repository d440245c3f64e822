"""Each detail of the model, broken on purpose, must make the comparison with the oracle fail.

This is the test of the parity tests: a detail whose breakage goes unnoticed is not guarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import dgemma.model.attention as attention_module
import dgemma.model.layers as layers_module
import dgemma.model.moe as experts_module
import dgemma.model.transformer as transformer_module
from comparison import Recorded, compare_recorded, record_sequence, worst
from dgemma.language_model import LanguageModel
from dgemma.model.attention import Attention, Rope, rotate
from dgemma.model.config import LayerKind
from dgemma.model.kv_cache import AttentionContext
from dgemma.model.layers import rms_norm
from dgemma.model.transformer import ForwardPlan, PassMode, SelfConditioning, Transformer
from oracle import CASES, Case, make_oracle, make_ours, oracle_cache, tokens

CAUGHT = 1e-3  # ten times the tolerance of the parity tests
SMALL_WINDOW = CASES[0]
LARGE_EPS = next(case for case in CASES if "eps" in case.name)

Mutation = Callable[[LanguageModel, pytest.MonkeyPatch], None]


def swap_layer_scalars(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    for layer in lm.transformer.layers:
        layer.causal_scalar, layer.denoising_scalar = layer.denoising_scalar, layer.causal_scalar


def one_layer_scalar_for_both_passes(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    for layer in lm.transformer.layers:
        layer.causal_scalar = layer.denoising_scalar


def usual_score_scale(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    mix = attention_module.grouped_query_attention
    patch.setattr(
        attention_module, "grouped_query_attention", lambda q, *rest: mix(q * q.shape[-1] ** -0.5, *rest)
    )


def value_is_the_finished_key(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    project = Attention.project

    def mutated(self: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        query, key, value = project(self, x, cos, sin)
        return query, key, (key if self.value is None else value)

    patch.setattr(Attention, "project", mutated)


def value_without_norm(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention_module, "rms_norm", lambda x, weight, eps: x)


def query_norm_after_rope(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    project = Attention.project

    def mutated(self: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        _, key, value = project(self, x, cos, sin)
        query = self.query.multiply(x).unflatten(-1, (-1, self.head_dim))
        return self.query_norm(rotate(query, cos, sin)), key, value

    patch.setattr(Attention, "project", mutated)


def window_one_longer(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    lm.transformer.config = replace(lm.config, window=lm.config.window + 1)


def window_one_shorter(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    lm.transformer.config = replace(lm.config, window=lm.config.window - 1)


def window_moves_with_the_canvas_token(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    def mutated(context: AttentionContext, kind: LayerKind, window: int, canvas_len: int) -> Tensor:
        past = context.positions(kind)[:, None]
        query = context.lengths[:, None, None] + torch.arange(canvas_len)[:, None]
        seen = (past >= 0) & (past > query - (window if kind is LayerKind.SLIDING else 10**6))
        canvas = torch.ones(seen.shape[0], canvas_len, canvas_len, dtype=torch.bool)
        return torch.cat((seen, canvas), -1)[:, None]

    patch.setattr(transformer_module, "denoising_mask", mutated)


def causal_canvas(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    denoising_mask = attention_module.denoising_mask

    def mutated(context: AttentionContext, kind: LayerKind, window: int, canvas_len: int) -> Tensor:
        mask = denoising_mask(context, kind, window, canvas_len).expand(-1, 1, canvas_len, -1).clone()
        mask[..., -canvas_len:] &= torch.ones(canvas_len, canvas_len).tril().bool()
        return mask

    patch.setattr(transformer_module, "denoising_mask", mutated)


def encode_sees_the_future(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    causal_mask = attention_module.causal_mask

    def mutated(positions: Tensor, *rest: object) -> Tensor:
        mask = causal_mask(positions, *rest)
        mask[..., -positions.shape[1] :] = True
        return mask

    patch.setattr(transformer_module, "causal_mask", mutated)


def rotate_the_whole_head(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    full = replace(lm.config.rope[LayerKind.FULL], rotated_share=1.0)
    config = replace(lm.config, rope={**lm.config.rope, LayerKind.FULL: full})
    lm.transformer.rope = Rope(config, torch.device("cpu"))


def canvas_positions_from_zero(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    plan = Transformer._plan

    def mutated(self: Transformer, mode: PassMode, positions: Tensor, *rest: object) -> ForwardPlan:
        if mode is PassMode.DENOISING:
            positions = positions - positions[:, :1]
        return plan(self, mode, positions, *rest)

    patch.setattr(Transformer, "_plan", mutated)


def router_reads_the_normed_copy(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    for layer in lm.transformer.layers:
        layer.router.register_forward_pre_hook(
            lambda module, args, norm=layer.before_experts: (norm(args[0]),)
        )


def router_scale_forgotten(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    for layer in lm.transformer.layers:
        layer.router.scale.fill_(1)


def expert_scale_forgotten(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    for layer in lm.transformer.layers:
        layer.router.expert_scale.fill_(1)


def gate_and_up_swapped(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    gated_gelu = experts_module.gated_gelu
    patch.setattr(experts_module, "gated_gelu", lambda gate, up: gated_gelu(up, gate))


def answers_not_brought_back_in_order(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    grouped = experts_module.Experts.grouped
    patch.setattr(experts_module.Experts, "grouped", lambda self, *args: grouped(self, *args).flip(0))


def experts_without_shared_mlp(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    for layer in lm.transformer.layers:
        layer.after_mlp.weight.zero_()


def norm_adds_one_to_its_weight(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layers_module, "rms_norm", lambda x, w, eps: rms_norm(x, None if w is None else 1 + w, eps))


def eps_forgotten(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    for module in lm.transformer.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-6


def first_step_without_final_norm(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    forward = SelfConditioning.forward
    patch.setattr(
        SelfConditioning, "forward", lambda self, e, soft: e if soft is None else forward(self, e, soft)
    )


def self_conditioning_ignored(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    forward = SelfConditioning.forward
    patch.setattr(SelfConditioning, "forward", lambda self, e, soft: forward(self, e, None))


def soft_embedding_unscaled(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    # The norm behind it hides the factor unless eps is large: hence the large-eps case.
    soft_embedding = Transformer.soft_embedding
    scale = lm.config.hidden_size**0.5
    patch.setattr(Transformer, "soft_embedding", lambda self, lo: soft_embedding(self, lo) / scale)


def embedding_unscaled(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    lm.transformer._embedding_scale = 1.0


def logits_not_capped(lm: LanguageModel, patch: pytest.MonkeyPatch) -> None:
    lm.transformer.config = replace(lm.config, logit_cap=1e5)


MUTATIONS: list[tuple[Mutation, Case]] = [
    (swap_layer_scalars, SMALL_WINDOW),
    (one_layer_scalar_for_both_passes, SMALL_WINDOW),
    (usual_score_scale, SMALL_WINDOW),
    (value_is_the_finished_key, SMALL_WINDOW),
    (value_without_norm, SMALL_WINDOW),
    (query_norm_after_rope, SMALL_WINDOW),
    (window_one_longer, SMALL_WINDOW),
    (window_one_shorter, SMALL_WINDOW),
    (window_moves_with_the_canvas_token, SMALL_WINDOW),
    (causal_canvas, SMALL_WINDOW),
    (encode_sees_the_future, SMALL_WINDOW),
    (rotate_the_whole_head, SMALL_WINDOW),
    (canvas_positions_from_zero, SMALL_WINDOW),
    (router_reads_the_normed_copy, SMALL_WINDOW),
    (router_scale_forgotten, SMALL_WINDOW),
    (expert_scale_forgotten, SMALL_WINDOW),
    (gate_and_up_swapped, SMALL_WINDOW),
    (answers_not_brought_back_in_order, SMALL_WINDOW),
    (experts_without_shared_mlp, SMALL_WINDOW),
    (norm_adds_one_to_its_weight, SMALL_WINDOW),
    (eps_forgotten, LARGE_EPS),
    (first_step_without_final_norm, SMALL_WINDOW),
    (self_conditioning_ignored, SMALL_WINDOW),
    (soft_embedding_unscaled, LARGE_EPS),
    (embedding_unscaled, SMALL_WINDOW),
    (logits_not_capped, SMALL_WINDOW),
]


@cache
def recorded(case: Case) -> Recorded:
    return record_sequence(make_oracle(case), case, 3 * case.window)


@pytest.mark.parametrize(("mutation", "case"), MUTATIONS, ids=lambda x: getattr(x, "__name__", ""))
@torch.no_grad()
def test_a_broken_detail_is_caught(mutation: Mutation, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_ours(make_oracle(case))
    assert max(compare_recorded(recorded(case), ours).values()) < 1e-4
    mutation(ours, monkeypatch)
    assert max(compare_recorded(recorded(case), ours).values()) > CAUGHT


@torch.no_grad()
def test_padding_that_leaks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different length: if padding reached the cache, the comparison would see it."""
    case = SMALL_WINDOW
    oracle = make_oracle(case)
    prompt, canvas = tokens(case, 2, 12, seed=1), tokens(case, 2, case.canvas_len, seed=2)

    def difference() -> float:
        ours = make_ours(oracle)
        cache = ours.new_cache(batch=2)
        ours.encode(prompt, cache, lengths=[12, 7])
        ours.encode(prompt, cache, lengths=[3, 12])
        logits = ours.logits(ours.denoise(canvas, cache))
        alone = torch.cat((prompt[1, :7], prompt[1]))[None]
        theirs = oracle(input_ids=alone, decoder_input_ids=canvas[1:], past_key_values=oracle_cache(oracle))
        return worst(logits[1:], theirs.logits)

    assert difference() < 1e-4
    append = transformer_module.AttentionContext.positions
    monkeypatch.setattr(
        transformer_module.AttentionContext,
        "positions",
        # As if every slot of a shorter row held a token.
        lambda self, kind: append(self, kind).abs(),
    )
    assert difference() > CAUGHT
