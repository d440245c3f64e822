"""Codes stand for exactly the numbers their definition gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgemma.model.quantized_tensor import QuantizedTensor, QuantKind, pack, unpack

FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def random_codes(
    kind: QuantKind, *shape: int, groups: int, seed: int = 0, zero_point: bool = False
) -> QuantizedTensor:
    """Any codes with any positive scales: [*shape] numbers, `groups` scales a row."""
    g = torch.Generator().manual_seed(seed)
    *lead, inner = shape
    stored = torch.randint(256, (*lead, inner // kind.per_byte), generator=g, dtype=torch.uint8)
    scale = torch.rand((*lead, groups), generator=g) + 0.1
    if kind is QuantKind.FLOAT8:
        return QuantizedTensor(
            kind, torch.randn(shape, generator=g).to(torch.float8_e4m3fn), scale.bfloat16()
        )
    if kind is QuantKind.FLOAT4:
        global_scale = torch.rand((*lead, 1), generator=g) + 0.5
        return QuantizedTensor(
            kind, stored, scale.to(torch.float8_e4m3fn), global_scale=global_scale, global_scale_divides=True
        )
    zeros = torch.randint(16, scale.shape, generator=g, dtype=torch.uint8) if zero_point else None
    return QuantizedTensor(kind, stored.view(kind.stored_as), scale.bfloat16(), zero_point=zeros)


@given(st.binary(min_size=1, max_size=64))
def test_packing_and_unpacking_are_inverse(data: bytes) -> None:
    stored = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(pack(unpack(stored)), stored)
    assert unpack(stored)[:2].tolist() == [data[0] % 16, data[0] // 16]


def test_four_bits_count_from_the_middle_or_from_their_zero() -> None:
    qdata = random_codes(QuantKind.INT4, 3, 8, groups=2)
    by_hand = [
        [(byte >> shift) % 16 for byte in row for shift in (0, 4)] for row in qdata.qdata.tolist()
    ]  # fmt: skip
    for zero_point in (None, torch.tensor([[1, 2], [3, 4], [5, 15]], dtype=torch.uint8)):
        found = QuantizedTensor(QuantKind.INT4, qdata.qdata, qdata.scale, zero_point=zero_point).dequantize(
            torch.float32
        )
        for r, row in enumerate(by_hand):
            for k, code in enumerate(row):
                off = 8 if zero_point is None else int(zero_point[r, k // 4])
                assert found[r, k].item() == (code - off) * qdata.scale[r, k // 4].float().item()


def test_a_four_bit_float_is_looked_up_and_scaled_twice() -> None:
    stored = pack(torch.arange(16, dtype=torch.uint8)[None].repeat(2, 1))
    scale = torch.tensor([[0.5], [2.0]]).to(torch.float8_e4m3fn)
    global_scale = torch.tensor([[3.0], [7.0]])
    times = QuantizedTensor(QuantKind.FLOAT4, stored, scale, global_scale=global_scale)
    over = QuantizedTensor(
        QuantKind.FLOAT4, stored, scale, global_scale=global_scale, global_scale_divides=True
    )
    assert times.dequantize(torch.float32).tolist() == [[v * 1.5 for v in FLOAT4], [v * 14 for v in FLOAT4]]
    seventh = (torch.tensor(2.0) / torch.tensor(7.0)).item()
    assert over.dequantize(torch.float32)[1].tolist() == [torch.tensor(v * seventh).item() for v in FLOAT4]


@pytest.mark.parametrize("kind", list(QuantKind))
def test_rows_and_experts_are_parts_of_the_whole(kind: QuantKind) -> None:
    experts_linear = random_codes(kind, 3, 6, 32, groups=1 if kind is QuantKind.INT8 else 2)
    whole = experts_linear.dequantize(torch.float32)
    assert whole.shape == experts_linear.shape == (3, 6, 32)
    assert torch.equal(experts_linear[1].dequantize(torch.float32), whole[1])
    assert torch.equal(experts_linear[1][2:5].dequantize(torch.float32), whole[1, 2:5])
    ids = torch.tensor([[5, 0], [2, 2]])
    assert torch.equal(experts_linear[2][ids].dequantize(torch.float32), whole[2][ids])


@pytest.mark.parametrize("kind", list(QuantKind))
def test_decoding_rounds_once(kind: QuantKind) -> None:
    qdata = random_codes(kind, 5, 32, groups=1)
    assert torch.equal(qdata.dequantize(torch.bfloat16), qdata.dequantize(torch.float32).bfloat16())
