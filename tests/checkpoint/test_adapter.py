"""Adapters on disk: PEFT reads ours and we read PEFT's, with the base they belong to or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dgemma
from adapters import SETTINGS, every_logit, train
from comparison import compare_sequence
from dgemma.checkpoint.adapter import load_adapter, save_adapter
from dgemma.checkpoint.adapter_source import open_adapter
from dgemma.checkpoint.fingerprint import file_fingerprint, fingerprint
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.checkpoint.source import open_checkpoint
from dgemma.language_model import LanguageModel
from dgemma.model.lora import (
    LoraExpertLinear,
    LoraFactors,
    LoraSettings,
    adapted,
    adapted_weights,
    attach,
    detach,
    lora_parameters,
)
from dgemma.model.transformer import Transformer
from oracle import CASES, make_oracle, make_ours, new_oracle

CASE = CASES[0]
CONFIG, WEIGHTS, DGEMMA_CONFIG = "adapter_config.json", "adapter_model.safetensors", "dgemma_adapter.json"
LINEAR = (
    r"model\.(decoder|encoder\.language_model)\.(layers\.\d+\.(self_attn|mlp)|self_conditioning)\.\w+_proj"
)


@pytest.fixture
def lm() -> LanguageModel:
    """The base."""
    return make_ours(make_oracle(CASE))


@pytest.fixture
def saved(lm: LanguageModel, tmp_path: Path) -> Path:
    train(lm.with_adapter(SETTINGS), seed=1).save_adapter(tmp_path / "adapter")
    return tmp_path / "adapter"


def only(transformer: Transformer, *ends: str) -> Transformer:
    """The adapted stack with a fresh start on the weights whose paths end so, and no others."""
    found = adapted_weights(attach(detach(transformer), SETTINGS, seed=5))
    added = {
        path: LoraFactors(down=weight.down, up=weight.up, alpha=weight.alpha)
        for path, weight in found.items()
        if path.endswith(ends)
    }
    return adapted(transformer, added)


# Round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_an_adapter_survives_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    base = make_ours(make_oracle(CASE), dtype=dtype)
    lm = train(base.with_adapter(SETTINGS), seed=1)
    lm.save_adapter(tmp_path)
    assert {t.dtype for t in load_file(tmp_path / WEIGHTS).values()} == {dtype}
    again = base.with_adapter(tmp_path)
    found, expected = lora_parameters(again.transformer), lora_parameters(lm.transformer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(factor.requires_grad for factor in found.values())
    assert torch.equal(every_logit(again, CASE), every_logit(lm, CASE))
    weights = adapted_weights(lm.transformer)
    assert all(w.alpha == weights[path].alpha for path, w in adapted_weights(again.transformer).items())


@torch.no_grad()
def test_fp32_factors_can_be_loaded_as_such_on_a_bf16_base_and_trained_on(tmp_path: Path) -> None:
    oracle = new_oracle(CASE)
    train(make_ours(oracle).with_adapter(SETTINGS), seed=1).save_adapter(tmp_path)
    base = make_ours(oracle, dtype=torch.bfloat16)
    source = open_adapter(tmp_path, base.config)
    for dtype, expected in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        transformer = load_adapter(
            base.transformer,
            source,
            base_fingerprint=fingerprint(base.transformer),
            dtype=dtype,
            trainable=True,
        )
        assert {f.dtype for f in lora_parameters(transformer).values()} == {expected}
        assert all(f.requires_grad for f in lora_parameters(transformer).values())


def test_our_files_are_listed_and_say_their_base(saved: Path, lm: LanguageModel) -> None:
    assert {file.name for file in saved.iterdir()} == {CONFIG, WEIGHTS, DGEMMA_CONFIG}
    ours = json.loads((saved / DGEMMA_CONFIG).read_text())
    assert ours == {"base_fingerprint": fingerprint(lm.transformer), "dgemma_version": dgemma.__version__}
    config = json.loads((saved / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6)  # the experts'; PEFT warns of patterns for them
    assert config["rank_pattern"]["self_attn.q_proj"] == 5
    assert set(config["alpha_pattern"].values()) == {7}


# PEFT


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=lambda case: case.name)
def test_peft_reads_our_file_and_computes_the_same_in_both_passes(case: Any, tmp_path: Path) -> None:
    """Every linear, every expert and the router; warnings are errors, so PEFT has none to give."""
    oracle = new_oracle(case)
    lm = train(make_ours(oracle).with_adapter(SETTINGS), seed=1)
    base = make_ours(oracle)
    lm.save_adapter(tmp_path)
    wrapped = peft.PeftModel.from_pretrained(oracle, tmp_path).base_model.model
    found = compare_sequence(wrapped, lm, case, length=20)
    assert max(found.values()) < 1e-4, found
    assert min(v for n, v in compare_sequence(wrapped, base, case, 20).items() if "cache" not in n) > 0.1


@pytest.mark.parametrize(
    "ends",
    [
        (".experts.gate_up",),
        (".experts.down",),
        ("0.experts.down", "1.experts.gate_up", "2.experts.gate_up", "2.experts.down"),
        ("attention.query", "self_conditioning.mlp.up"),
        ("0.mlp.up", "router.scores"),
    ],
    ids=lambda ends: " ".join(ends),
)
def test_peft_reads_any_part_of_it(ends: tuple[str, ...], tmp_path: Path) -> None:
    oracle = new_oracle(CASE)
    base = make_ours(oracle)
    lm = train(LanguageModel(only(base.transformer, *ends)), seed=1)
    lm.save_adapter(tmp_path)
    again = base.with_adapter(tmp_path)
    assert lora_parameters(again.transformer).keys() == lora_parameters(lm.transformer).keys()
    wrapped = peft.PeftModel.from_pretrained(oracle, tmp_path).base_model.model
    assert max(compare_sequence(wrapped, again, CASE, length=20).values()) < 1e-4


def test_ranks_may_differ_from_weight_to_weight(tmp_path: Path) -> None:
    oracle = new_oracle(CASE)
    base = make_ours(oracle)
    added = {}
    for number, (path, weight) in enumerate(adapted_weights(base.with_adapter(SETTINGS).transformer).items()):
        rank = weight.rank if isinstance(weight, LoraExpertLinear) else 1 + number % 3
        down, up = weight.down[..., :rank, :], torch.randn(*weight.up.shape[:-1], rank) * 0.1
        added[path] = LoraFactors(down=down, up=up, alpha=1.0 + number % 2)
    lm = LanguageModel(adapted(base.transformer, added))
    lm.save_adapter(tmp_path)
    again = base.with_adapter(tmp_path)
    with torch.no_grad():
        assert torch.equal(every_logit(again, CASE), every_logit(lm, CASE))
    with pytest.warns(RuntimeWarning, match="alpha_pattern keys did not match"):  # it does follow them
        wrapped = peft.PeftModel.from_pretrained(oracle, tmp_path).base_model.model
    assert max(compare_sequence(wrapped, again, CASE, length=20).values()) < 1e-4


def test_peft_itself_merges_a_shared_weight_twice(saved: Path, lm: LanguageModel) -> None:
    """Why `dgemma merge` exists; once this fails, adapter_source.py need not warn of it."""
    name = "layers.0.attention.query.weight"
    whole = peft.PeftModel.from_pretrained(new_oracle(CASE), saved).merge_and_unload()
    theirs = whole.state_dict()["model.decoder.layers.0.self_attn.q_proj.weight"]
    base = lm.transformer.get_parameter(name)
    ours = lm.with_adapter(saved).merged().transformer.get_parameter(name)
    torch.testing.assert_close(theirs - base, 2 * (ours - base), atol=1e-5, rtol=0)


@torch.no_grad()
def write_with_peft(path: Path, tied: bool = True, **options: Any) -> nn.Module:
    """An adapter that PEFT made and saved; both doors' factors equal, as our weights are. -> its model."""
    oracle = new_oracle(CASE)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEAR, **options}
    model = peft.get_peft_model(oracle, peft.LoraConfig(**settings)).eval()
    factors = {name: p for name, p in model.named_parameters() if "lora_" in name}
    torch.manual_seed(1)
    for name, factor in factors.items():
        twin = name.replace("model.encoder.language_model.", "model.decoder.")
        if tied and twin != name:
            continue
        factor.copy_(torch.randn(factor.shape) * 0.1)
    if tied:
        for name, factor in factors.items():
            factor.copy_(factors.get(name.replace("encoder.language_model.", "decoder."), factor))
    model.save_pretrained(path)
    return model.base_model.model


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_parameters": EXPERTS},
        {"target_parameters": EXPERTS[:1], "target_modules": []},
        {"target_parameters": EXPERTS[1:], "target_modules": ["router.proj"]},
        {"target_parameters": EXPERTS, "use_rslora": True, "rank_pattern": {"experts.down_proj": 2}},
        {"rank_pattern": {r"^model\.decoder\.self_conditioning\.up_proj": 2}, "alpha_pattern": {"o_proj": 3}},
        {"target_modules": ["o_proj"], "exclude_modules": r".*vision.*"},
        {"layers_to_transform": [1], "target_modules": ["router.proj"], "lora_dropout": 0.1},
    ],
    ids=str,
)
def test_we_read_what_peft_writes(options: dict[str, Any], tmp_path: Path) -> None:
    oracle = write_with_peft(tmp_path, **options)
    lm = make_ours(make_oracle(CASE)).with_adapter(tmp_path)
    found = compare_sequence(oracle, lm, CASE, length=20)
    assert max(found.values()) < 1e-4, found


def test_two_passes_with_different_factors_are_refused(tmp_path: Path, lm: LanguageModel) -> None:
    write_with_peft(tmp_path, tied=False)
    with pytest.raises(dgemma.CheckpointError, match="differs between encoder and decoder, but this model"):
        lm.with_adapter(tmp_path)
    shutil.rmtree(tmp_path)
    write_with_peft(tmp_path, alpha_pattern={"decoder.layers.0.mlp.up_proj": 9})
    with pytest.raises(dgemma.CheckpointError, match=r"the alpha of .* differs between encoder and decoder"):
        lm.with_adapter(tmp_path)


@pytest.mark.parametrize("door", ["decoder", "encoder"])
@torch.no_grad()
def test_one_of_the_two_names_is_enough(door: str, saved: Path, lm: LanguageModel) -> None:
    expected = every_logit(lm.with_adapter(saved), CASE)
    tensors = load_file(saved / WEIGHTS)
    kept = {n: t for n, t in tensors.items() if f"model.{door}." in n or "self_conditioning" in n}
    assert len(kept) < len(tensors)
    save_file(kept, saved / WEIGHTS)
    config = json.loads((saved / CONFIG).read_text())
    for key in ("target_modules", "target_parameters"):
        config[key] = [n for n in config[key] if f"model.{door}." in n or "self_conditioning" in n]
    (saved / CONFIG).write_text(json.dumps(config))
    assert torch.equal(every_logit(lm.with_adapter(saved), CASE), expected)


# The base it belongs to


def test_a_fingerprint_names_the_base_whatever_dtype_or_adapter(tmp_path: Path) -> None:
    write_random(tmp_path / "a", PRESETS["tiny"].config, dtype="F32", seed=1, max_shard_bytes=400_000)
    write_random(tmp_path / "b", PRESETS["tiny"].config, dtype="F32", seed=2)
    stacks = [dgemma.load(tmp_path / "a", dtype=dtype).transformer for dtype in ("float32", "bfloat16")]
    lm = dgemma.load(tmp_path / "a")
    stacks += [lm.with_adapter(SETTINGS).transformer, lm.exact().transformer]
    found = {fingerprint(transformer) for transformer in stacks}
    found.add(file_fingerprint(open_checkpoint(tmp_path / "a")))
    assert len(found) == 1
    assert len(found.copy().pop()) == 64
    assert fingerprint(dgemma.load(tmp_path / "b").transformer) not in found
    assert fingerprint(train(lm.with_adapter(SETTINGS), seed=1).merged().transformer) not in found
    with torch.no_grad():
        lm.transformer.layers[1].denoising_scalar *= 1.01
    assert fingerprint(lm.transformer) not in found


@torch.no_grad()
def test_an_adapter_loads_on_its_base_and_refuses_another(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_random(tmp_path / f"base{seed}", PRESETS["tiny"].config, seed=seed)
    base = dgemma.load(tmp_path / "base1")
    train(base.with_adapter(LoraSettings()), seed=1).save_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base1")
    for dtype in ("float32", "bfloat16"):
        lm = dgemma.load(tmp_path / "base1", dtype=dtype, adapter=tmp_path / "adapter")
        assert {str(f.dtype) for f in lora_parameters(lm.transformer).values()} == {f"torch.{dtype}"}
    other = dgemma.load(tmp_path / "base2")
    with pytest.raises(dgemma.CheckpointError) as caught:
        other.with_adapter(tmp_path / "adapter")
    assert fingerprint(base.transformer) in str(caught.value)
    assert fingerprint(other.transformer) in str(caught.value)
    (tmp_path / "adapter" / DGEMMA_CONFIG).unlink()  # as one that PEFT wrote: shapes decide
    assert adapted_weights(other.with_adapter(tmp_path / "adapter").transformer)


def test_a_wrong_adapter_is_refused_before_the_base_is_read(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random(tmp_path / "base", PRESETS["tiny"].config)
    monkeypatch.setattr("dgemma.loading.load_transformer", lambda *args, **options: 1 / 0)
    with pytest.raises(dgemma.CheckpointError, match="requires"):
        dgemma.load(tmp_path / "base", adapter=saved)
    with pytest.raises(dgemma.CheckpointError, match="; give the directory of an adapter"):
        dgemma.load(tmp_path / "base", adapter=tmp_path / "base")


# Broken files


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**config, **changes}))

    return change


def edit_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS)

    return edit


def truncate(path: Path) -> None:
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate((path / WEIGHTS).stat().st_size - 100)


def pickle_instead(path: Path) -> None:
    (path / WEIGHTS).unlink()
    (path / "adapter_model.bin").write_bytes(b"")


Q = "base_model.model.model.decoder.layers.0.self_attn.q_proj.lora_"
DOWN = "base_model.model.model.encoder.language_model.layers.2.experts.lora_A.weight"
BREAKS: list[tuple[str, Callable[[Path], None], str]] = [
    ("truncated", truncate, "is truncated: its tensors need"),
    ("no weights", lambda p: (p / WEIGHTS).unlink(), "does not exist"),
    ("a pickle", pickle_instead, "'adapter_model.bin', a pickle file, which can run code"),
    ("no config", lambda p: (p / CONFIG).unlink(), "has no adapter_config.json; give the directory"),
    ("half a config", lambda p: (p / CONFIG).write_text("{"), "is not valid JSON"),
    ("half a pair", edit_tensors(lambda t: t.pop(Q + "B.weight")), f"lacks the tensor '{Q}B.weight'"),
    ("a lost expert", edit_tensors(lambda t: t.pop(DOWN)), f"lacks the tensor '{DOWN}'"),
    (
        "misshapen",
        edit_tensors(lambda t: t.update({Q + "A.weight": torch.zeros(5, 31)})),
        "has shape [5, 31]; rank 5 on a weight of [32, 32] requires [5, 32]",
    ),
    (
        "wrong rank",
        edit_config(r=2),
        "rank 2 on a weight of [8, 32, 32] requires [16, 32]",
    ),
    (
        "unknown tensor",
        edit_tensors(lambda t: t.update({Q.replace("q_proj", "qq_proj") + "A.weight": torch.zeros(1)})),
        f"qq_proj.lora_A.weight'; did you mean '{Q}A.weight'?",
    ),
    (
        "an embedding",
        edit_tensors(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(1)})),
        "holds 1 tensors that adapter_config.json or this model does not name",
    ),
    (
        "whole numbers",
        edit_tensors(lambda t: t.update({Q + "A.weight": torch.zeros(5, 32, dtype=torch.int32)})),
        "is stored as I32; supported: F32, BF16, F16",
    ),
    ("experts not named", edit_config(target_parameters=None), "tensors that adapter_config.json or this"),
    ("nothing named", edit_config(target_parameters=[], target_modules=[]), "does not name"),
    ("another kind", edit_config(peft_type="LOHA"), "peft_type is 'LOHA'; dgemma reads LORA adapters only"),
    ("dora", edit_config(use_dora=True), "use_dora is True; dgemma has no such feature"),
    ("bias", edit_config(bias="all"), "bias is 'all'; dgemma's weights have none"),
    ("more modules", edit_config(modules_to_save=["lm_head"]), "modules_to_save is ['lm_head']; dgemma has"),
    (
        "unheard of",
        edit_config(use_tomorrows_trick=1),
        "use_tomorrows_trick is 1; dgemma has no such feature",
    ),
    ("a start", edit_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'; such a start changes"),
    ("rank text", edit_config(r="4"), "r is '4'; it must be a whole number above 0"),
    ("alpha text", edit_config(lora_alpha=None), "lora_alpha is None; it must be a number"),
    ("alpha huge", edit_config(lora_alpha=10**400), "it must be a number"),
    (
        "a list of numbers",
        edit_config(target_modules=[1]),
        "target_modules is [1]; it must be a list of names",
    ),
    ("parameters by rule", edit_config(target_parameters="x"), "target_parameters is 'x'; it must be a list"),
    ("a list of ranks", edit_config(rank_pattern=[1]), "rank_pattern is [1]; it must map names to numbers"),
    ("rank zero", edit_config(rank_pattern={"q_proj": 0}), "it must map names to numbers"),
    ("a rule", edit_config(alpha_pattern={"(a+)+b": 1}), "its key '(a+)+b' is a rule. Write the names out"),
    ("no base", lambda p: (p / DGEMMA_CONFIG).write_text("{}"), "has no base_fingerprint; it is corrupt"),
]


@pytest.mark.parametrize(("break_it", "message"), [b[1:] for b in BREAKS], ids=[b[0] for b in BREAKS])
def test_a_broken_adapter_is_refused_by_name(
    break_it: Callable[[Path], None], message: str, saved: Path, lm: LanguageModel
) -> None:
    lm.with_adapter(saved)
    break_it(saved)
    with pytest.raises(dgemma.CheckpointError) as caught:
        lm.with_adapter(saved)
    assert message in str(caught.value), str(caught.value)


def test_an_empty_adapter_is_refused(saved: Path, lm: LanguageModel) -> None:
    edit_config(target_modules=[], target_parameters=[])(saved)
    save_file({}, saved / WEIGHTS)
    with pytest.raises(dgemma.CheckpointError, match="adapts nothing; "):
        lm.with_adapter(saved)


# Saving


def test_an_adapter_is_not_overwritten_unless_told(saved: Path, lm: LanguageModel) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    other = train(lm.with_adapter(LoraSettings(rank=2, targets=("mlp",))), seed=2)
    with pytest.raises(dgemma.CheckpointError, match="holds an adapter; choose another directory, or overw"):
        other.save_adapter(saved)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    other.save_adapter(saved, overwrite=True)
    assert {file.name for file in saved.iterdir()} == before.keys()
    with torch.no_grad():
        assert torch.equal(every_logit(lm.with_adapter(saved), CASE), every_logit(other, CASE))


def test_a_failed_save_leaves_the_old_adapter_whole(
    saved: Path, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}

    def no_room(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dgemma.checkpoint.adapter.write_json", no_room)
    with pytest.raises(dgemma.CheckpointError, match="cannot be written: No space left on device"):
        lm.with_adapter(LoraSettings(rank=2)).save_adapter(saved, overwrite=True)
    assert {name: (saved / name).read_bytes() for name in before} == before
    lm.with_adapter(saved)


def test_what_cannot_be_saved_is_refused_with_a_remedy(lm: LanguageModel, tmp_path: Path) -> None:
    with pytest.raises(dgemma.InputError, match="has no adapter to save; make one with `with_adapter`"):
        lm.save_adapter(tmp_path / "a")
    fresh = lm.with_adapter(SETTINGS)
    with pytest.raises(
        dgemma.InputError, match=r"save merged\(\), or the adapter alone with save_adapter\(\)"
    ):
        fresh.save(tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(dgemma.CheckpointError, match="is a file; give a directory"):
        fresh.save_adapter(tmp_path / "file")
    assert not (tmp_path / "a").exists()


def test_the_version_is_left_open_where_dgemma_is_not_installed(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    transformer = lm.with_adapter(SETTINGS).transformer
    monkeypatch.setattr(importlib.metadata, "version", missing)
    save_adapter(transformer, tmp_path, base_fingerprint="f")
    assert json.loads((tmp_path / DGEMMA_CONFIG).read_text()) == {
        "base_fingerprint": "f",
        "dgemma_version": None,
    }
