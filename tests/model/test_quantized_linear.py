"""A weight in few bits answers as the plain weight it stands for, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgemma.model.linear import PlainExpertLinear, PlainLinear
from dgemma.model.quantized_linear import QuantizedExpertLinear, QuantizedLinear
from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind
from model.test_quantized_tensor import random_codes

KINDS = list(QuantKind)


def matrices(kind: QuantKind, dtype: torch.dtype) -> tuple[QuantizedLinear, PlainLinear]:
    quantized = random_codes(kind, 24, 64, groups=1 if kind is QuantKind.INT8 else 4)
    plain = PlainLinear(24, 64, dtype=dtype, device=torch.device("cpu"))
    plain.weight.data.copy_(quantized.dequantize(dtype))
    return QuantizedLinear(quantized, dtype=dtype, rounds_activations=False), plain


def banks(kind: QuantKind, dtype: torch.dtype) -> tuple[QuantizedExpertLinear, PlainExpertLinear]:
    quantized = random_codes(kind, 5, 24, 64, groups=1 if kind is QuantKind.INT8 else 4)
    plain = PlainExpertLinear(5, 24, 64, dtype=dtype, device=torch.device("cpu"))
    plain.weight.data.copy_(quantized.dequantize(dtype))
    return QuantizedExpertLinear(quantized, rounds_activations=False), plain


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_answers_as_the_plain_one(kind: QuantKind, dtype: torch.dtype) -> None:
    quantized, plain = matrices(kind, dtype)
    x, shares = normal(3, 64, dtype=dtype), normal(3, 24, dtype=dtype)
    ids = torch.tensor([[3, 3], [0, 23]])
    assert (quantized.in_features, quantized.out_features, quantized.dtype) == (64, 24, dtype)
    some = slice(8, 24)
    assert torch.equal(quantized.gather_rows(ids), plain.gather_rows(ids))
    pairs = [
        (quantized.multiply(x), plain.multiply(x)),
        (quantized.multiply(x, some), plain.multiply(x, some)),
        (quantized.mix_rows(shares), plain.mix_rows(shares)),
        (quantized.mix_rows(shares[:, some], some), plain.mix_rows(shares[:, some], some)),
    ]
    for found, expected in pairs:
        assert found.dtype == dtype
        if dtype == torch.float32:  # our kernel adds up in another order than torch
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        else:  # where bf16 is imitated, the weight is not rounded to it
            assert torch.allclose(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_many_rows_are_mixed_as_few_are() -> None:
    quantized = random_codes(QuantKind.INT8, 2500, 8, groups=1)
    matrix = QuantizedLinear(quantized, dtype=torch.float32)
    shares = normal(3, 2500)
    expected = shares.double() @ quantized.dequantize(torch.float32).double()
    assert torch.allclose(matrix.mix_rows(shares).double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bank_answers_as_the_plain_one_and_leaves_idle_experts_alone(kind: QuantKind) -> None:
    quantized, plain = banks(kind, torch.float32)
    x = normal(9, 64)
    ends = torch.tensor([2, 2, 6, 6, 9], dtype=torch.int32)
    torch.testing.assert_close(quantized.multiply(3, x), plain.multiply(3, x), rtol=1e-5, atol=1e-3)
    expected = torch.cat([plain.multiply(0, x[:2]), plain.multiply(2, x[2:6]), plain.multiply(4, x[6:])])
    torch.testing.assert_close(quantized.multiply_grouped(x, ends), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_input_as_through_the_plain_weight(kind: QuantKind) -> None:
    quantized, plain = matrices(kind, torch.float32)
    grads = []
    for weight in (quantized, plain):
        x = normal(3, 64).requires_grad_()
        weight.multiply(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


def test_a_decoded_weight_does_not_live_until_the_backward_pass() -> None:
    quantized = random_codes(QuantKind.INT4, 512, 1024, groups=32)
    matrix = QuantizedLinear(quantized, dtype=torch.float32, rounds_activations=False)
    x = normal(2, 1024).requires_grad_()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.linear(x, quantized.dequantize(torch.float32))
        assert max(kept) == 512 * 1024  # what torch would keep
        kept.clear()
        result = matrix.multiply(x)
    assert not kept
    result.sum().backward()
    assert torch.allclose(x.grad, F.linear(torch.ones(2, 512), quantized.dequantize(torch.float32).t()))


def test_quantized_weights_are_few_bytes() -> None:
    quantized = random_codes(QuantKind.INT4, 64, 1024, groups=32)
    assert QuantizedLinear(quantized, dtype=torch.bfloat16).nbytes == 64 * 1024 // 2 + 64 * 32 * 2


def test_a_vocabulary_is_multiplied_some_rows_at_a_time_and_never_dequantized_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantized = random_codes(QuantKind.INT8, 20_000, 16, groups=1)
    linear = QuantizedLinear(quantized, dtype=torch.float32, rounds_activations=False)
    weight = quantized.dequantize(torch.float32)
    dequantized: list[int] = []
    dequantize = QuantizedTensor.dequantize

    def counted(qdata: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        dequantized.append(qdata.shape[0])
        return dequantize(qdata, dtype)

    monkeypatch.setattr(QuantizedTensor, "dequantize", counted)
    x = normal(3, 16).requires_grad_()
    out = linear.multiply(x)
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    torch.testing.assert_close(out, F.linear(x, weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1), rtol=1e-4, atol=1e-3)
    assert max(dequantized) < 20_000
