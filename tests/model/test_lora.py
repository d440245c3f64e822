"""Adapters: nothing at first, the same merged or not, every factor learns, the base is never touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgemma
from adapters import SETTINGS, every_logit, train
from dgemma.checkpoint.presets import PRESETS
from dgemma.language_model import LanguageModel
from dgemma.model.execution import Execution
from dgemma.model.kv_cache import KVCache
from dgemma.model.linear import ExpertLinear, Linear, PlainExpertLinear, PlainLinear
from dgemma.model.lora import (
    LoraExpertLinear,
    LoraFactors,
    LoraLinear,
    LoraSettings,
    adapted,
    adapted_weights,
    attach,
    detach,
    has_adapter,
    lora_parameters,
    merged,
)
from dgemma.model.transformer import Transformer
from fake_cuda import DEVICE, FakeCuda
from int8_weight import Int8Matrix
from oracle import CASES, Case, calm_oracle, make_oracle, make_ours, tokens
from sizes import GRAPH_BACKEND

CASE = CASES[0]
EVERY_EXPERT = CASES[5]  # every token visits every expert: no step flips a choice, every expert learns
CPU = torch.device("cpu")
FORMS = {
    "by expert": Execution(grouped_experts=False),
    "grouped": Execution(),
    "in blocks": Execution(expert_block=4),
}
every_form = pytest.mark.parametrize("execution", FORMS.values(), ids=list(FORMS))


class Int8Bank(ExpertLinear):
    def __init__(self, plain: PlainExpertLinear) -> None:
        super().__init__()
        self.num_experts = plain.num_experts
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.scale = nn.Buffer(plain.weight.abs().amax(2, keepdim=True) / 127)
        self.codes = nn.Buffer((plain.weight / self.scale).round().to(torch.int8))

    def wide(self) -> Tensor:
        return self.codes * self.scale

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        return x @ self.wide()[expert].T

    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, self.wide().transpose(-2, -1), offs=ends)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def quantized(lm: LanguageModel) -> LanguageModel:
    for parent in list(lm.transformer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PlainLinear):
                setattr(parent, name, Int8Matrix(child))
            elif isinstance(child, PlainExpertLinear):
                setattr(parent, name, Int8Bank(child))
    return lm


def loss_of(lm: LanguageModel, case: Case) -> Tensor:
    canvas = tokens(case, 1, case.canvas_len, seed=2)
    cache = lm.new_cache()
    lm.encode(tokens(case, 1, 13, seed=1), cache)
    logits = lm.logits(lm.denoise(canvas, cache))
    again = lm.logits(lm.denoise(canvas, cache, lm.soft_embedding(logits)))
    return nn.functional.cross_entropy(again[0], canvas[0])


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "rank is -1; it must be a whole number of at least 0"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"expert_rank": True}, "expert_rank is True"),
        ({"alpha": 0}, "alpha is 0; it must be a number above 0"),
        ({"expert_alpha": float("nan")}, "expert_alpha is nan"),
        ({"alpha": float("inf")}, "alpha is inf"),
        ({"targets": "experts"}, "targets is 'experts'; it must be a tuple"),
        (
            {"targets": ("atention",)},
            "'atention', which is no part of the transformer; did you mean 'attention'",
        ),
        ({"targets": ("mlp", "embedding")}, "tied to the vocabulary, so it takes no adapter. Choose out of"),
        ({"targets": ()}, "adapts nothing; name a part whose rank is above 0"),
        ({"targets": ("experts",), "expert_rank": 0}, "adapts nothing"),
    ],
)
def test_wrong_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dgemma.InputError) as caught:
        LoraSettings(**options)
    assert message in str(caught.value)


def test_the_defaults_adapt_every_linear_and_expert_at_scale_two_but_not_the_router() -> None:
    transformer = make_ours(make_oracle(CASE)).transformer
    found = adapted_weights(attach(transformer, LoraSettings(), seed=0))
    linears = {p for p, m in transformer.named_modules() if isinstance(m, Linear | ExpertLinear)}
    plain = {path for path in linears if path.startswith("vision.")}
    assert plain, "the oracle's checkpoints have a tower, which stays as it is"
    assert set(found) == {p for p in linears - plain if p != "embedding" and "router" not in p}
    assert {weight.scale for weight in found.values()} == {2.0}
    assert {w.rank for w in found.values() if isinstance(w, LoraLinear)} == {16}
    assert {w.rank for w in found.values() if isinstance(w, LoraExpertLinear)} == {4}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (LoraSettings(targets=("router",)), {"router"}),
        (LoraSettings(rank=0), {"experts"}),
        (LoraSettings(expert_rank=0), {"attention", "mlp", "self_conditioning"}),
        (LoraSettings(targets=("attention", "experts"), rank=0), {"experts"}),
    ],
)
def test_a_part_with_rank_zero_or_not_named_is_left_alone(settings: LoraSettings, parts: set[str]) -> None:
    found = adapted_weights(attach(make_ours(make_oracle(CASE)).transformer, settings, seed=0))
    assert {p.split(".")[2] if p.startswith("layers") else p.split(".")[0] for p in found} == parts


def test_factors_depend_on_seed_and_path_alone() -> None:
    transformer = make_ours(make_oracle(CASE)).transformer
    whole = lora_parameters(attach(transformer, LoraSettings(), seed=7))
    part = lora_parameters(attach(transformer, LoraSettings(targets=("experts",)), seed=7))
    other = lora_parameters(attach(transformer, LoraSettings(), seed=-(10**30)))
    assert part.keys() < whole.keys()
    assert all(torch.equal(whole[name], factor) for name, factor in part.items())
    downs = [name for name in whole if name.endswith("down") and not torch.equal(whole[name], other[name])]
    assert len(downs) == len(whole) // 2
    spread = whole["layers.0.experts.gate_up.down"].std().item()
    assert spread == pytest.approx(transformer.config.hidden_size**-0.5, rel=0.1)


def test_how_many_numbers_an_adapter_of_the_released_model_has() -> None:
    transformer = Transformer(PRESETS["26b"].config, dtype=torch.bfloat16, device="meta")

    def count(settings: LoraSettings) -> int:
        return sum(
            factor.numel() for factor in lora_parameters(attach(transformer, settings, seed=0)).values()
        )

    assert count(LoraSettings(targets=("experts",), expert_rank=16)) == 475_791_360
    assert count(LoraSettings(targets=("experts",))) == 118_947_840
    assert count(LoraSettings(expert_rank=0)) == 18_822_144
    assert count(LoraSettings()) == 137_769_984


# What it computes


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_fresh_adapter_changes_no_bit_in_either_pass(dtype: torch.dtype, exact: bool) -> None:
    base = make_ours(make_oracle(CASE), dtype=dtype).exact(exact)
    fresh = base.with_adapter(SETTINGS)
    assert torch.equal(every_logit(fresh, CASE), every_logit(base, CASE))
    again = every_logit(train(fresh, seed=1), CASE)
    assert (again - every_logit(base, CASE)).abs().max() > 1


@every_form
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]], ids=lambda case: case.name)
@torch.no_grad()
def test_merged_equals_unmerged_and_detached_is_the_base_again(
    case: Case, exact: bool, execution: Execution
) -> None:
    base = make_ours(calm_oracle(case), execution=replace(execution, exact=exact))
    lm = train(base.with_adapter(SETTINGS), seed=1)
    whole = lm.merged()
    assert not has_adapter(whole.transformer)
    expected = every_logit(lm, case)
    assert (expected - every_logit(base, case)).abs().max() > 1
    torch.testing.assert_close(every_logit(whole, case), expected, atol=3e-5, rtol=1e-5)
    assert torch.equal(every_logit(lm, case), expected)
    assert torch.equal(every_logit(lm.without_adapter(), case), every_logit(base, case))


@torch.no_grad()
def test_merging_rounds_once_from_fp32() -> None:
    base = make_ours(make_oracle(CASE), dtype=torch.bfloat16)
    lm = train(base.with_adapter(SETTINGS), seed=1)
    for path, weight in adapted_weights(lm.transformer).items():
        whole = merged(lm.transformer).get_parameter(f"{path}.weight")
        wide = weight.base.weight.float() + weight.scale * (weight.up.float() @ weight.down.float())
        assert whole.dtype == torch.bfloat16
        assert torch.equal(whole, wide.bfloat16()), path


@torch.no_grad()
def test_every_question_to_an_adapted_matrix_has_the_answer_of_the_merged_one() -> None:
    torch.manual_seed(0)
    base = PlainLinear(24, 16, dtype=torch.float32, device=CPU)
    base.weight.normal_()
    added = LoraFactors(down=torch.randn(3, 16), up=torch.randn(24, 3), alpha=1.5)
    matrix = LoraLinear(base, added)
    whole = PlainLinear(24, 16, dtype=torch.float32, device=CPU)
    whole.weight.copy_(base.weight + 0.5 * added.up @ added.down)
    x, shares = torch.randn(5, 16), torch.rand(5, 24)
    some, ids = slice(3, 17), torch.tensor([[0, 23], [7, 7]])
    close = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(matrix.multiply(x), whole.multiply(x), **close)
    torch.testing.assert_close(matrix.multiply(x, some), whole.multiply(x, some), **close)
    torch.testing.assert_close(matrix.gather_rows(ids), whole.gather_rows(ids), **close)
    torch.testing.assert_close(matrix.mix_rows(shares), whole.mix_rows(shares), **close)
    torch.testing.assert_close(
        matrix.mix_rows(shares[:, some], some), whole.mix_rows(shares[:, some], some), **close
    )
    assert matrix.dtype == torch.float32
    assert matrix.nbytes == base.nbytes + 4 * 3 * (16 + 24)


@pytest.mark.parametrize("rank", [1, 3, 4, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_rank_can_be_grouped_and_equals_expert_by_expert(rank: int, dtype: torch.dtype) -> None:
    """torch's grouped product refuses rows that are no multiple of 16 bytes, on the CPU as on CUDA."""
    torch.manual_seed(rank)
    base = PlainExpertLinear(4, 24, 16, dtype=dtype, device=CPU)
    nn.init.normal_(base.weight)
    added = LoraFactors(down=torch.randn(4, rank, 16), up=torch.randn(4, 24, rank), alpha=float(rank))
    experts_linear = LoraExpertLinear(base, added)
    x = torch.randn(10, 16).to(dtype)
    ends = torch.tensor([3, 3, 7, 10], dtype=torch.int32)  # the second expert has no rows
    together = experts_linear.multiply_grouped(x, ends)
    apart = torch.cat(
        [experts_linear.multiply(e, x[s:t]) for e, (s, t) in ((0, (0, 3)), (2, (3, 7)), (3, (7, 10)))]
    )
    assert together.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.5
    torch.testing.assert_close(together, apart, atol=tolerance, rtol=0)
    (together * torch.randn(10, 24).to(dtype)).sum().backward()
    for factor in (experts_linear.down, experts_linear.up):
        assert factor.grad is not None
        assert factor.grad.shape == factor.shape
        touched = factor.grad.flatten(1).abs().amax(1) > 0
        assert touched.tolist() == [True, False, True, True]
    assert experts_linear.nbytes == base.nbytes + experts_linear.down.nbytes + experts_linear.up.nbytes


@torch.no_grad()
def test_in_the_exact_way_a_row_does_not_depend_on_its_company() -> None:
    lm = train(make_ours(make_oracle(CASE), dtype=torch.bfloat16).with_adapter(SETTINGS), seed=1).exact()
    prompt, canvas = tokens(CASE, 3, 20, seed=1), tokens(CASE, 3, 8, seed=2)
    together, alone = lm.new_cache(3), lm.new_cache(1)
    hidden = lm.encode(prompt, together)
    assert torch.equal(hidden[1:2], lm.encode(prompt[1:2], alone))
    assert torch.equal(lm.denoise(canvas, together)[1:2], lm.denoise(canvas[1:2], alone))


# Learning


@every_form
def test_every_factor_of_every_expert_learns_and_nothing_else(execution: Execution) -> None:
    base = make_ours(calm_oracle(EVERY_EXPERT), execution=execution)
    lm = base.with_adapter(SETTINGS)
    factors = lora_parameters(lm.transformer)
    others = {n: p.clone() for n, p in lm.transformer.named_parameters() if n not in factors}
    assert all(factor.requires_grad for factor in factors.values())
    assert [n for n, p in lm.transformer.named_parameters() if p.requires_grad] == [*factors]
    optimizer = torch.optim.SGD(factors.values(), lr=0.1)
    before = loss_of(lm, EVERY_EXPERT)
    before.backward()
    for name, factor in factors.items():
        assert factor.grad is not None, name
        per_expert = factor.grad.flatten(1) if "experts" in name else factor.grad.flatten()[None]
        assert ((per_expert.abs().amax(1) > 0) == name.endswith(".up")).all(), name  # up is zero still
    optimizer.step()
    optimizer.zero_grad()
    after = loss_of(lm, EVERY_EXPERT)
    assert after < before
    after.backward()
    for name, factor in factors.items():
        per_expert = factor.grad.flatten(1) if "experts" in name else factor.grad.flatten()[None]
        assert (per_expert.abs().amax(1) > 0).all(), name
    assert all(torch.equal(p, others[n]) for n, p in lm.transformer.named_parameters() if n not in factors)
    assert all(p.grad is None for n, p in lm.transformer.named_parameters() if n not in factors)


@every_form
def test_factors_get_the_gradient_of_finite_differences(execution: Execution) -> None:
    lm = make_ours(make_oracle(EVERY_EXPERT), execution=execution)
    lm = train(lm.with_adapter(SETTINGS), seed=1, size=0.05)
    loss_of(lm, EVERY_EXPERT).backward()
    factors = lora_parameters(lm.transformer)
    for name in (
        "layers.1.experts.gate_up.down",
        "layers.0.experts.down.up",
        "layers.0.attention.query.down",
        "self_conditioning.mlp.up.up",
    ):
        factor = factors[name]
        expected = factor.grad.norm().item()
        step = 1e-3 * factor.norm() * factor.grad / expected
        with torch.no_grad():
            factor += step
            up = loss_of(lm, EVERY_EXPERT)
            factor -= 2 * step
            down = loss_of(lm, EVERY_EXPERT)
            factor += step
        assert ((up - down) / (2 * step.norm())).item() == pytest.approx(expected, rel=0.03), name


def test_fp32_factors_on_a_bf16_base_learn_in_fp32() -> None:
    base = make_ours(make_oracle(EVERY_EXPERT), dtype=torch.bfloat16)
    transformer = attach(base.transformer, SETTINGS, seed=0, dtype=torch.float32)
    lm = LanguageModel(transformer)
    assert {factor.dtype for factor in lora_parameters(transformer).values()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(every_logit(lm, EVERY_EXPERT), every_logit(base, EVERY_EXPERT))
    loss_of(lm, EVERY_EXPERT).backward()
    for name, factor in lora_parameters(transformer).items():
        assert factor.grad.dtype == torch.float32
        assert (factor.grad.abs().max() > 0) == name.endswith(".up")
    assert lm.dtype == torch.bfloat16


# Sharing


def test_the_base_is_shared_not_copied_and_goes_on_without_the_adapter() -> None:
    base = make_ours(make_oracle(CASE))
    before = every_logit(base, CASE)
    transformer = base.with_adapter(SETTINGS).transformer
    wrapped = adapted_weights(transformer)
    places = {name: tensor.data_ptr() for name, tensor in base.transformer.state_dict().items()}
    for name, place in places.items():
        path, _, leaf = name.rpartition(".")
        there = f"{path}.base.{leaf}" if path in wrapped else name
        assert transformer.state_dict()[there].data_ptr() == place, name
    assert {n: t.data_ptr() for n, t in detach(transformer).state_dict().items()} == places
    shared = {n: t.data_ptr() for n, t in merged(transformer).state_dict().items()}
    assert {n for n in places if shared[n] != places[n]} == {f"{path}.weight" for path in wrapped}
    assert torch.equal(every_logit(base, CASE), before)
    assert not has_adapter(base.transformer)


@torch.no_grad()
def test_two_adapters_of_one_base_do_not_disturb_each_other() -> None:
    base = make_ours(make_oracle(CASE))
    before = every_logit(base, CASE)
    one = train(base.with_adapter(SETTINGS, seed=1), seed=1)
    alone = every_logit(one, CASE)
    two = train(base.with_adapter(LoraSettings(rank=2, targets=("attention",)), seed=2), seed=2)
    other = every_logit(two, CASE)
    assert (alone - other).abs().max() > 1
    assert torch.equal(every_logit(one, CASE), alone)
    train(two, seed=3)
    assert torch.equal(every_logit(one, CASE), alone)
    assert torch.equal(every_logit(base, CASE), before)


def test_a_base_in_training_is_frozen_in_the_adapted_stack_alone() -> None:
    base = make_ours(make_oracle(CASE))
    base.transformer.requires_grad_(True)
    transformer = base.with_adapter(SETTINGS).transformer
    assert {n for n, p in transformer.named_parameters() if p.requires_grad} == set(
        lora_parameters(transformer)
    )
    assert all(p.requires_grad for p in base.transformer.parameters())
    place = base.transformer.get_parameter("layers.0.mlp.up.weight").data_ptr()
    assert transformer.get_parameter("layers.0.mlp.up.base.weight").data_ptr() == place


def test_a_second_adapter_on_top_is_refused() -> None:
    lm = make_ours(make_oracle(CASE)).with_adapter(SETTINGS)
    with pytest.raises(dgemma.InputError, match="has an adapter already; detach it first"):
        adapted(lm.transformer, {})
    with pytest.raises(dgemma.InputError, match=r"has an adapter already; call without_adapter\(\) first"):
        lm.with_adapter(SETTINGS)
    assert not has_adapter(lm.without_adapter().without_adapter().transformer)


# Other bases and devices


def test_an_adapter_on_an_int8_base_computes_and_learns_as_on_the_plain_one() -> None:
    base, plain = quantized(make_ours(make_oracle(CASE))), make_ours(make_oracle(CASE))
    for path, module in plain.transformer.named_modules():
        if isinstance(module, PlainLinear | PlainExpertLinear):
            wide = base.transformer.get_submodule(path).wide()
            module.weight = nn.Parameter(wide.clone(), requires_grad=False)
    lm = train(base.with_adapter(SETTINGS), seed=1)
    twin = train(plain.with_adapter(SETTINGS), seed=1)
    for exact in (False, True):
        found, expected = (every_logit(one.exact(exact), CASE) for one in (lm, twin))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    loss_of(lm, CASE).backward()
    assert all(factor.grad is not None for factor in lora_parameters(lm.transformer).values())
    assert torch.equal(every_logit(lm.without_adapter(), CASE), every_logit(base, CASE))
    with pytest.raises(dgemma.InputError, match="is a Int8Matrix; only plain weights can be merged"):
        lm.merged()


@torch.no_grad()
def test_the_released_model_with_the_default_adapter_runs_under_fake_cuda() -> None:
    config = PRESETS["26b"].config
    with FakeCuda():
        transformer = attach(Transformer(config, dtype=torch.bfloat16, device=DEVICE), LoraSettings(), seed=0)
        cache = KVCache(config, 2, dtype=torch.bfloat16, device=DEVICE)
        canvas = torch.zeros(2, config.canvas_len, dtype=torch.long, device=DEVICE)
        hidden = transformer.denoise(canvas, cache.context())
        assert hidden.shape == (2, 256, 2816)
        assert hidden.device.type == "cuda"
        assert {factor.device.type for factor in lora_parameters(transformer).values()} == {"cuda"}


@torch.no_grad()
def test_an_adapted_stack_compiles_to_one_graph() -> None:
    lm = train(make_ours(make_oracle(EVERY_EXPERT), dtype=torch.bfloat16).with_adapter(SETTINGS), seed=1)
    cache = lm.new_cache()
    lm.encode(tokens(CASE, 1, 13, seed=1), cache)
    canvas = tokens(CASE, 1, 8, seed=2)
    torch._dynamo.reset()
    denoise = torch.compile(lm.transformer.denoise, fullgraph=True, backend=GRAPH_BACKEND)
    assert torch.equal(denoise(canvas, cache.context()), lm.transformer.denoise(canvas, cache.context()))
