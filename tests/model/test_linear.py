"""Layers reach weights only through their protocol, so that another kind of weight can take its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dgemma.language_model import LanguageModel
from dgemma.model import linear
from dgemma.model.config import LayerKind
from dgemma.model.linear import ExpertLinear, PlainExpertLinear, PlainLinear
from int8_weight import Int8Matrix
from oracle import CASES, make_oracle, make_ours, tokens

CASE = CASES[0]


class LoraBank(ExpertLinear):
    """A wrapped bank with a low-rank addition per expert, as an adapter would be."""

    def __init__(self, base: ExpertLinear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.num_experts = base.num_experts
        self.in_features, self.out_features = base.in_features, base.out_features
        make = {"dtype": torch.float32, "device": torch.device("cpu")}
        self.down = PlainExpertLinear(base.num_experts, rank, base.in_features, **make)
        self.up = PlainExpertLinear(base.num_experts, base.out_features, rank, **make)
        nn.init.normal_(self.down.weight, std=0.1)
        nn.init.zeros_(self.up.weight)

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        return self.base.multiply(expert, x) + self.up.multiply(expert, self.down.multiply(expert, x))

    def multiply_grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        low = self.down.multiply_grouped(x, ends)
        return self.base.multiply_grouped(x, ends) + self.up.multiply_grouped(low, ends)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.down.nbytes + self.up.nbytes


def every_logit(lm: LanguageModel) -> Tensor:
    cache = lm.new_cache()
    hidden = lm.encode(tokens(CASE, 1, 20, seed=1), cache)
    logits = lm.logits(lm.denoise(tokens(CASE, 1, 8, seed=2), cache))
    again = lm.denoise(tokens(CASE, 1, 8, seed=2), cache, lm.soft_embedding(logits))
    return torch.cat([lm.logits(hidden), logits, lm.logits(again)], dim=1)


def replace_all(root: nn.Module, kind: type[nn.Module], make: object) -> int:
    count = 0
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is kind:
                setattr(parent, name, make(child))
                count += 1
    return count


@torch.no_grad()
def test_every_matrix_can_be_another_kind_without_touching_a_layer() -> None:
    lm, twin = make_ours(make_oracle(CASE)), make_ours(make_oracle(CASE))
    num_values = sum(shape.kind is LayerKind.SLIDING for shape in lm.config.layers)
    num_matrices = 1 + 3 + 7 * len(lm.config.layers) + num_values
    assert lm.transformer.vision is not None
    num_matrices += sum(type(module) is PlainLinear for module in lm.transformer.vision.modules())
    assert replace_all(lm.transformer, PlainLinear, Int8Matrix) == num_matrices

    def round_plain(plain: PlainLinear) -> PlainLinear:
        wide = Int8Matrix(plain).wide()
        plain.weight.copy_(wide)
        return plain

    for module in twin.transformer.modules():
        if isinstance(module, PlainLinear):
            round_plain(module)
    torch.testing.assert_close(every_logit(lm), every_logit(twin), atol=1e-4, rtol=0)
    assert lm.transformer.embedding.nbytes < twin.transformer.embedding.nbytes / 2


def test_a_low_rank_addition_on_every_expert_starts_as_nothing_and_learns() -> None:
    lm = make_ours(make_oracle(CASE))
    with torch.no_grad():
        before = every_logit(lm)
    assert replace_all(
        lm.transformer, PlainExpertLinear, lambda experts_linear: LoraBank(experts_linear, rank=8)
    ) == 2 * len(lm.config.layers)
    for name, parameter in lm.transformer.named_parameters():
        parameter.requires_grad = ".up.weight" in name and "experts" in name
    after = every_logit(lm)
    torch.testing.assert_close(before, after)
    after.pow(2).mean().backward()
    gradients = [p.grad for p in lm.transformer.parameters() if p.requires_grad]
    assert all(g is not None and g.abs().max() > 0 for g in gradients)
    assert lm.transformer.layers[0].experts.down.nbytes > lm.transformer.layers[0].experts.down.base.nbytes
    exact = lm.exact()
    torch.testing.assert_close(every_logit(exact), before, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_column_and_row_split_over_two_halves_adds_up_to_the_whole() -> None:
    """Tensor parallelism by weight: a layer asks a weight for its width, never the config."""
    lm = make_ours(make_oracle(CASES[8]))  # as many KV heads as query heads: both split in two
    layer = lm.transformer.layers[0]
    x = torch.randn(1, 5, lm.config.hidden_size)
    cos = sin = torch.zeros(1, 5, 1, layer.attention.head_dim)
    whole = [t.clone() for t in layer.attention.project(x, cos, sin)]
    mlp_whole = layer.mlp(x)
    parts, mlp_parts = [], []
    saved = {n: p.clone() for n, p in layer.state_dict().items()}
    for half in (0, 1):
        for name in ("query", "key", "value"):
            matrix = getattr(layer.attention, name)
            matrix.weight = nn.Parameter(saved[f"attention.{name}.weight"].chunk(2)[half])
        for name, dim in (("gate", 0), ("up", 0), ("down", 1)):
            matrix = getattr(layer.mlp, name)
            matrix.weight = nn.Parameter(saved[f"mlp.{name}.weight"].chunk(2, dim)[half])
        parts.append(layer.attention.project(x, cos, sin))
        mlp_parts.append(layer.mlp(x))
    for number, expected in enumerate(whole):
        joined = torch.cat([part[number] for part in parts], dim=2)
        torch.testing.assert_close(joined, expected)
    torch.testing.assert_close(mlp_parts[0] + mlp_parts[1], mlp_whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_longer_than_the_kernels_buffers_are_left_to_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "HAS_BF16_INSTRUCTIONS", False)
    inner = linear.MAX_INNER + 16
    plain = PlainLinear(3, inner, dtype=dtype, device=torch.device("cpu"))
    experts = PlainExpertLinear(2, 3, inner, dtype=dtype, device=torch.device("cpu"))
    for weight in (plain.weight, experts.weight):
        torch.nn.init.normal_(weight, std=inner**-0.5)
    x = torch.randn(4, inner).to(dtype)
    expected = x.double() @ plain.weight.double().t()
    torch.testing.assert_close(plain.multiply(x).double(), expected, rtol=0.01, atol=0.02)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    assert experts.multiply_exact(x, ends) is None
    torch.testing.assert_close(
        experts.multiply_grouped(x, ends)[:1].double(),
        x[:1].double() @ experts.weight[0].double().t(),
        rtol=0.01,
        atol=0.02,
    )
