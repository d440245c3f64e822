"""Codes stand for exactly the numbers their definition gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgemma.model.codes import CodeKind, Codes, pack, unpack

FLOAT4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def random_codes(kind: CodeKind, *shape: int, groups: int, seed: int = 0, zero: bool = False) -> Codes:
    """Any codes with any positive scales: [*shape] numbers, `groups` scales a row."""
    g = torch.Generator().manual_seed(seed)
    *lead, inner = shape
    stored = torch.randint(256, (*lead, inner // kind.per_byte), generator=g, dtype=torch.uint8)
    scale = torch.rand((*lead, groups), generator=g) + 0.1
    if kind is CodeKind.FLOAT8:
        return Codes(kind, torch.randn(shape, generator=g).to(torch.float8_e4m3fn), scale.bfloat16())
    if kind is CodeKind.FLOAT4:
        outer = torch.rand((*lead, 1), generator=g) + 0.5
        return Codes(kind, stored, scale.to(torch.float8_e4m3fn), outer=outer, outer_divides=True)
    zeros = torch.randint(16, scale.shape, generator=g, dtype=torch.uint8) if zero else None
    return Codes(kind, stored.view(kind.stored_as), scale.bfloat16(), zero=zeros)


@given(st.binary(min_size=1, max_size=64))
def test_packing_and_unpacking_are_inverse(data: bytes) -> None:
    stored = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(pack(unpack(stored)), stored)
    assert unpack(stored)[:2].tolist() == [data[0] % 16, data[0] // 16]


def test_four_bits_count_from_the_middle_or_from_their_zero() -> None:
    codes = random_codes(CodeKind.INT4, 3, 8, groups=2)
    by_hand = [
        [(byte >> shift) % 16 for byte in row for shift in (0, 4)] for row in codes.codes.tolist()
    ]  # fmt: skip
    for zero in (None, torch.tensor([[1, 2], [3, 4], [5, 15]], dtype=torch.uint8)):
        found = Codes(CodeKind.INT4, codes.codes, codes.scale, zero=zero).decode(torch.float32)
        for r, row in enumerate(by_hand):
            for k, code in enumerate(row):
                off = 8 if zero is None else int(zero[r, k // 4])
                assert found[r, k].item() == (code - off) * codes.scale[r, k // 4].float().item()


def test_a_four_bit_float_is_looked_up_and_scaled_twice() -> None:
    stored = pack(torch.arange(16, dtype=torch.uint8)[None].repeat(2, 1))
    scale = torch.tensor([[0.5], [2.0]]).to(torch.float8_e4m3fn)
    outer = torch.tensor([[3.0], [7.0]])
    times = Codes(CodeKind.FLOAT4, stored, scale, outer=outer)
    over = Codes(CodeKind.FLOAT4, stored, scale, outer=outer, outer_divides=True)
    assert times.decode(torch.float32).tolist() == [[v * 1.5 for v in FLOAT4], [v * 14 for v in FLOAT4]]
    seventh = (torch.tensor(2.0) / torch.tensor(7.0)).item()
    assert over.decode(torch.float32)[1].tolist() == [torch.tensor(v * seventh).item() for v in FLOAT4]


@pytest.mark.parametrize("kind", list(CodeKind))
def test_rows_and_experts_are_parts_of_the_whole(kind: CodeKind) -> None:
    bank = random_codes(kind, 3, 6, 32, groups=1 if kind is CodeKind.INT8 else 2)
    whole = bank.decode(torch.float32)
    assert whole.shape == bank.shape == (3, 6, 32)
    assert torch.equal(bank[1].decode(torch.float32), whole[1])
    assert torch.equal(bank[1][2:5].decode(torch.float32), whole[1, 2:5])
    ids = torch.tensor([[5, 0], [2, 2]])
    assert torch.equal(bank[2][ids].decode(torch.float32), whole[2][ids])


@pytest.mark.parametrize("kind", list(CodeKind))
def test_decoding_rounds_once(kind: CodeKind) -> None:
    codes = random_codes(kind, 5, 32, groups=1)
    assert torch.equal(codes.decode(torch.bfloat16), codes.decode(torch.float32).bfloat16())
