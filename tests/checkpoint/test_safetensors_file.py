"""Our reader and writer against the format's own library, and against arbitrary bytes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dgemma.checkpoint.safetensors_file import (
    CHUNK_BYTES,
    ITEM_BITS,
    ITEM_BYTES,
    TensorToWrite,
    read_chunks,
    read_entries,
    read_into,
    same_content,
    write_file,
)
from dgemma.errors import CheckpointError

quick = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}
shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.dictionaries(st.text(min_size=1), st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=6))
@quick
def test_what_we_write_the_library_reads(tmp_path: Path, wanted: dict[str, tuple[str, list[int]]]) -> None:
    wanted.pop("__metadata__", None)
    tensors = {n: torch.randn(shape).mul(50).to(DTYPES[d]) for n, (d, shape) in wanted.items()}
    path = tmp_path / "a.safetensors"
    write_file(
        path,
        [
            TensorToWrite(
                name,
                wanted[name][0],
                tuple(tensor.shape),
                lambda tensor=tensor: [tensor.reshape(-1).view(torch.uint8).numpy()],
            )
            for name, tensor in tensors.items()
        ],
    )
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@given(st.dictionaries(st.text(min_size=1), st.tuples(st.sampled_from(sorted(DTYPES)), shapes), min_size=1))
@quick
def test_what_the_library_writes_we_read(tmp_path: Path, wanted: dict[str, tuple[str, list[int]]]) -> None:
    wanted.pop("__metadata__", None)
    tensors = {n: torch.randn(shape).mul(50).to(DTYPES[d]) for n, (d, shape) in wanted.items()}
    save_file(tensors, tmp_path / "b.safetensors")
    entries = {entry.name: entry for entry in read_entries(tmp_path / "b.safetensors")}
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        raw = np.empty(entries[name].nbytes, np.uint8)
        read_into(entries[name], raw)
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw.tobytes() == expected
        assert b"".join(bytes(c) for c in read_chunks(entries[name], 7)) == expected


RARE_DTYPES = {
    "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F4": torch.float4_e2m1fn_x2,
}


@pytest.mark.parametrize("name", RARE_DTYPES)
def test_rare_dtypes_are_read_and_written_as_the_library_does(tmp_path: Path, name: str) -> None:
    stored = torch.arange(64, dtype=torch.uint8).view(2, 32)
    save_file({"a": stored.view(RARE_DTYPES[name])}, tmp_path / "library.safetensors")
    (entry,) = read_entries(tmp_path / "library.safetensors")
    assert (entry.dtype, entry.nbytes) == (name, 64)
    raw = np.empty(64, np.uint8)
    read_into(entry, raw)
    assert raw.tobytes() == stored.numpy().tobytes()
    ours = TensorToWrite("a", name, entry.shape, lambda: [raw])
    write_file(tmp_path / "ours.safetensors", [ours])
    (again,) = read_entries(tmp_path / "ours.safetensors")
    assert (again.dtype, again.shape, again.nbytes) == (entry.dtype, entry.shape, 64)


def test_four_bit_tensors_that_end_inside_a_byte_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(CheckpointError, match="3 numbers of 4 bits are not whole bytes"):
        read_entries(path)


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b'], "data_offsets": [0, 4]}}'
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="has no readable header"):
        read_entries(path)


def test_a_header_that_would_take_minutes_to_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((96_000_000).to_bytes(8, "little"))
        file.truncate(97_000_000)
    began = time.process_time()
    with pytest.raises(CheckpointError, match="claims a header of 96000000 bytes"):
        read_entries(path)
    assert time.process_time() - began < 1


@given(st.binary(max_size=200))
@quick
def test_arbitrary_bytes_are_refused_or_read_but_never_crash(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(data)
    try:
        read_entries(path)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017 - refusing is optional, naming the file is not


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
entry_like = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "BF16", "X"]) | json_values,
     "shape": st.lists(st.integers(-1, 2**70), max_size=4) | json_values,
     "data_offsets": st.lists(st.integers(-1, 2**70), min_size=2, max_size=2) | json_values}
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=5), entry_like | json_values, max_size=4))
@quick
def test_arbitrary_headers_are_refused_or_fit_the_file(tmp_path: Path, header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "d.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 64)
    try:
        entries = read_entries(path)
    except CheckpointError:
        return
    assert sum(entry.nbytes for entry in entries) == 64


def test_a_half_written_file_never_appears_under_its_name(tmp_path: Path) -> None:
    def fail() -> list[bytes]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "x.safetensors", [TensorToWrite("a", "U8", (3,), fail)])
    assert not (tmp_path / "x.safetensors").exists()


def test_a_file_without_permission_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(CheckpointError, match="cannot be opened: Permission denied"):
        read_entries(tmp_path / "x.safetensors")


def test_item_sizes_are_those_of_the_dtypes() -> None:
    names = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
        "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16", "U32": "uint32",
        "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64",
        "C64": "complex64",
    }  # fmt: skip
    sizes = {name: getattr(torch, dtype).itemsize for name, dtype in names.items()}
    assert sizes == ITEM_BYTES
    assert {"F4": 4, **{name: 8 * size for name, size in sizes.items()}} == ITEM_BITS


@pytest.mark.parametrize(("size", "problem"), [(7, "has only 7 bytes"), (8, "has no readable header")])
def test_a_file_of_a_few_bytes_is_refused(size: int, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=problem):
        read_entries(path)


def test_a_file_that_is_refused_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    whole = os.open

    def noted(*args: Any) -> int:
        opened.append(whole(*args))
        return opened[-1]

    monkeypatch.setattr(os, "open", noted)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_entries(tmp_path)
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_contents_of_different_lengths_differ(tmp_path: Path) -> None:
    # Equal to the end of the first, whose length is that of a chunk.
    sizes = (CHUNK_BYTES, 2 * CHUNK_BYTES)
    tensors = [TensorToWrite(str(n), "U8", (n,), lambda n=n: [bytes(n)]) for n in sizes]
    write_file(tmp_path / "a.safetensors", tensors)
    first, second = read_entries(tmp_path / "a.safetensors")
    assert same_content(first, first)
    assert not same_content(first, second)
