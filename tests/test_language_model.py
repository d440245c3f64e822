"""The public handle: documented shapes, typed errors, no tokenizer needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dgemma
from dgemma.checkpoint import device
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.language_model import LanguageModel
from oracle import CASES, make_oracle, make_ours, tokens

CASE = CASES[0]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return make_ours(make_oracle(CASE))


@torch.inference_mode()
def test_the_passes_have_their_documented_shapes(tmp_path: Path) -> None:
    write_random(tmp_path / "m", PRESETS["tiny"].config)
    for file in (tmp_path / "m").glob("*token*"):
        file.unlink()  # load works without tokenizer files
    model = dgemma.load(tmp_path / "m", dtype="float32", device="cpu")
    cache = model.new_cache(batch=2)
    assert model.encode(torch.randint(2048, (2, 9)), cache, lengths=[9, 4]).shape == (2, 9, 64)
    assert cache.lengths == (9, 4)
    canvas = torch.randint(2048, (2, 32))
    logits = model.logits(model.denoise(canvas, cache))
    assert logits.shape == (2, 32, 2048)
    assert logits.dtype == torch.float32
    assert logits.abs().max() <= 30
    soft = model.soft_embedding(logits)
    assert soft.shape == (2, 32, 64)
    assert model.denoise(canvas, cache, soft=soft).shape == (2, 32, 64)
    assert model.device.type == "cpu"


@torch.inference_mode()
def test_dtype_auto_is_the_files_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor can: see checkpoint/test_device.py."""
    monkeypatch.setattr(device, "has_fast_bf16", lambda: True)
    for stored, expected in (("BF16", torch.bfloat16), ("F32", torch.float32)):
        write_random(tmp_path / stored, PRESETS["tiny"].config, dtype=stored)
        assert dgemma.load(tmp_path / stored).dtype == expected


@torch.inference_mode()
def test_exact_is_an_argument_of_load(tmp_path: Path) -> None:
    write_random(tmp_path / "m", PRESETS["tiny"].config)
    assert dgemma.load(tmp_path / "m", exact=True).transformer.execution.exact
    assert not dgemma.load(tmp_path / "m").transformer.execution.exact


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm, c: lm.encode(torch.zeros(2, 3), c), "must be whole numbers"),
        (lambda lm, c: lm.encode(torch.zeros(3, dtype=torch.long), c), "of shape"),
        (lambda lm, c: lm.encode(torch.zeros(1, 3, dtype=torch.long), c), "takes 2 rows"),
        (lambda lm, c: lm.encode(torch.zeros(2, 0, dtype=torch.long), c), "at least one token"),
        (lambda lm, c: lm.encode(torch.full((2, 3), 96), c), "holds token 96; this vocabulary ends at 95"),
        (lambda lm, c: lm.encode(torch.full((2, 3), -1), c), "holds token -1"),
        (lambda lm, c: lm.encode(torch.zeros(2, 3, dtype=torch.long), c, [1]), "one number from 0 to 3"),
        (lambda lm, c: lm.encode(torch.zeros(2, 3, dtype=torch.long), c, [4, 1]), "one number from 0 to 3"),
        (lambda lm, c: lm.denoise(torch.ones(2, 8).long(), c, torch.zeros(2, 8, 3)), "soft has shape"),
        (lambda lm, c: lm.denoise(torch.full((2, 8), 96), c), "canvas holds token 96"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_refused_and_leaves_the_cache_alone(
    lm: LanguageModel, call: object, message: str
) -> None:
    cache = lm.new_cache(2)
    with pytest.raises(dgemma.InputError, match=message):
        call(lm, cache)
    assert cache.lengths == (0, 0)


def test_a_prompt_beyond_the_models_context_is_refused(lm: LanguageModel) -> None:
    cache = lm.new_cache()
    with pytest.raises(dgemma.InputError, match="this model takes 131072"):
        lm.encode(torch.zeros(1, 131_073, dtype=torch.long), cache)


def test_devices_and_dtypes_that_are_not_here_are_refused(tmp_path: Path) -> None:
    write_random(tmp_path / "m", PRESETS["tiny"].config)
    with pytest.raises(dgemma.DeviceError, match="not available here"):
        dgemma.load(tmp_path / "m", device="mps" if torch.cuda.is_available() else "cuda")
    with pytest.raises(dgemma.DeviceError, match=r"not known; did you mean 'cuda'\? Known"):
        dgemma.load(tmp_path / "m", device="cudda")
    with pytest.raises(dgemma.DeviceError, match=r"'warp' is not known\. Known: auto, cpu, gpu, cuda, mps\."):
        dgemma.load(tmp_path / "m", device="warp")
    with pytest.raises(dgemma.InputError, match="did you mean 'float32'"):
        dgemma.load(tmp_path / "m", dtype="floot32")


@torch.inference_mode()
def test_lengths_may_be_a_tensor_and_all_zero(lm: LanguageModel) -> None:
    cache = lm.new_cache(2)
    hidden = lm.encode(tokens(CASE, 2, 5, seed=1), cache, lengths=torch.tensor([0, 0]))
    assert (hidden == 0).all()
    assert cache.lengths == (0, 0)


def test_the_public_names_are_there_and_no_others() -> None:
    assert set(dir(dgemma)) == set(dgemma.__all__)
    for name in dgemma.__all__:
        assert getattr(dgemma, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dgemma.nonsense  # noqa: B018
