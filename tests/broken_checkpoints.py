"""Forty ways to break a checkpoint. Each takes a good directory and returns what the error must say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Break = Callable[[Path], str]
BREAKS: list[Break] = []
FIRST = "model-00001-of-00002.safetensors"


def broken(function: Break) -> Break:
    BREAKS.append(function)
    return function


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def edit_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "model.safetensors.index.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def edit_header(directory: Path, change: Callable[[dict[str, Any]], Any], name: str = FIRST) -> None:
    """Rewrite a shard's header; `change` may return other text to put in its place."""
    file = directory / name
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    raw = text if isinstance(text, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def some_tensor(header: dict[str, Any]) -> dict[str, Any]:
    return next(v for k, v in sorted(header.items()) if k.endswith("gate_up_proj"))


# --- files


@broken
def empty_directory(d: Path) -> str:
    for file in d.iterdir():
        file.unlink()
    return "config.json is missing"


@broken
def no_weights(d: Path) -> str:
    for file in d.glob("model*"):
        file.unlink()
    return "neither model.safetensors nor"


@broken
def pickle_instead(d: Path) -> str:
    for file in d.glob("model*"):
        file.unlink()
    (d / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    return "pickle file"


@broken
def pickle_renamed(d: Path) -> str:
    (d / FIRST).write_bytes(b"\x80\x04\x95\x1f\x00\x00\x00\x00" + b"cos\nsystem\n" * 10)
    return "not a safetensors file"


@broken
def missing_shard(d: Path) -> str:
    (d / FIRST).unlink()
    return "does not exist"


@broken
def shard_is_a_directory(d: Path) -> str:
    (d / FIRST).unlink()
    (d / FIRST).mkdir()
    return "not a regular file"


@broken
def shard_is_a_named_pipe(d: Path) -> str:
    (d / FIRST).unlink()
    os.mkfifo(d / FIRST)
    return "not a regular file"


@broken
def shard_is_empty(d: Path) -> str:
    (d / FIRST).write_bytes(b"")
    return "truncated"


@broken
def shard_ends_in_its_header(d: Path) -> str:
    (d / FIRST).write_bytes((d / FIRST).read_bytes()[:100])
    return "ends inside its header"


@broken
def shard_lacks_its_last_byte(d: Path) -> str:
    (d / FIRST).write_bytes((d / FIRST).read_bytes()[:-1])
    return "truncated"


@broken
def shard_has_bytes_behind(d: Path) -> str:
    with (d / FIRST).open("ab") as file:
        file.write(b"extra")
    return "after its last tensor"


# --- headers


@broken
def absurd_header_length(d: Path) -> str:
    data = (d / FIRST).read_bytes()
    (d / FIRST).write_bytes((2**63).to_bytes(8, "little") + data[8:])
    return "claims a header of"


@broken
def header_is_not_json(d: Path) -> str:
    edit_header(d, lambda h: b'{"a": ' + b"!" * 50)
    return "no readable header"


@broken
def header_is_not_utf8(d: Path) -> str:
    edit_header(d, lambda h: b'{"\xff\xfe": 1}')
    return "no readable header"


@broken
def header_is_a_list(d: Path) -> str:
    edit_header(d, lambda h: b"[1, 2]")
    return "not a JSON object"


@broken
def header_is_a_deep_nest(d: Path) -> str:
    edit_header(d, lambda h: b"[" * 200_000)
    return "no readable header"


@broken
def duplicate_name_in_one_file(d: Path) -> str:
    def twice(header: dict[str, Any]) -> bytes:
        text = json.dumps(header)
        name = next(k for k in header if k != "__metadata__")
        return (text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode()

    edit_header(d, twice)
    return "twice"


@broken
def duplicate_name_across_files(d: Path) -> str:
    second = "model-00002-of-00002.safetensors"
    (d / second).write_bytes((d / FIRST).read_bytes())
    return "the shards are from different saves"


@broken
def unknown_dtype(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(dtype="F13"))
    return "dtype 'F13' is not known"


@broken
def integer_weights(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(dtype="I16"))
    return "stored as I16"


@broken
def dtype_of_another_size(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(dtype="F32"))
    return "its offsets span"


@broken
def negative_shape(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(shape=[-1, 4, 4]))
    return "not a list of sizes"


@broken
def shape_of_huge_numbers(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(shape=[2**40, 2**40, 2**40]))
    return "its shape needs"


@broken
def shape_of_text(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(shape="8x8"))
    return "not a list of sizes"


@broken
def shape_transposed(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(shape=some_tensor(h)["shape"][::-1]))
    return "config.json requires"


@broken
def offsets_backwards(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(data_offsets=[100, 50]))
    return "not two rising numbers"


@broken
def offsets_overlap(d: Path) -> str:
    def overlap(header: dict[str, Any]) -> None:
        entry = some_tensor(header)
        size = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [2, 2 + size]

    edit_header(d, overlap)
    return "gap or an overlap"


@broken
def offsets_beyond_the_file(d: Path) -> str:
    def beyond(header: dict[str, Any]) -> None:
        last = max((v for k, v in header.items() if k != "__metadata__"), key=lambda v: v["data_offsets"])
        last["data_offsets"] = [o + 10**12 for o in last["data_offsets"]]

    edit_header(d, beyond)
    return "gap or an overlap"


@broken
def extra_field_in_an_entry(d: Path) -> str:
    edit_header(d, lambda h: some_tensor(h).update(compression="zip"))
    return "needs exactly"


# --- the index


@broken
def index_escapes_upwards(d: Path) -> str:
    edit_index(d, lambda i: i["weight_map"].update(evil="../../etc/passwd.safetensors"))
    return "only safetensors files beside"


@broken
def index_escapes_absolutely(d: Path) -> str:
    edit_index(d, lambda i: i["weight_map"].update(evil="/etc/x.safetensors"))
    return "only safetensors files beside"


@broken
def index_names_a_path_of_windows(d: Path) -> str:
    edit_index(d, lambda i: i["weight_map"].update(evil="..\\x.safetensors"))
    return "only safetensors files beside"


@broken
def index_points_to_a_pickle(d: Path) -> str:
    edit_index(d, lambda i: i["weight_map"].update(evil="weights.bin"))
    return "only safetensors files beside"


@broken
def index_points_to_a_number(d: Path) -> str:
    edit_index(d, lambda i: i["weight_map"].update(evil=7))
    return "only safetensors files beside"


@broken
def index_without_map(d: Path) -> str:
    edit_index(d, lambda i: i.pop("weight_map"))
    return "no weight_map"


@broken
def index_names_an_absent_tensor(d: Path) -> str:
    edit_index(d, lambda i: i["weight_map"].update(absent=FIRST))
    return "but it is not"


@broken
def index_is_truncated(d: Path) -> str:
    file = d / "model.safetensors.index.json"
    file.write_text(file.read_text()[:200])
    return "not valid JSON"


# --- names


def rename(d: Path, old: str, new: str) -> None:
    """In whichever shard holds it, and in the index."""
    index = json.loads((d / "model.safetensors.index.json").read_text())
    shard = index["weight_map"].pop(old)
    index["weight_map"][new] = shard
    (d / "model.safetensors.index.json").write_text(json.dumps(index))

    def change(header: dict[str, Any]) -> None:
        header[new] = header.pop(old)

    edit_header(d, change, shard)


@broken
def misspelt_tensor(d: Path) -> str:
    rename(d, "model.decoder.norm.weight", "model.decoder.nrom.weight")
    return "lacks 1 tensors: 'model.decoder.norm.weight'"


@broken
def extra_tensor(d: Path) -> str:
    name = "model.decoder.layers.0.mlp.bias"
    entry = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}
    edit_header(d, lambda h: h.update({name: entry}))
    edit_index(d, lambda i: i["weight_map"].update({name: FIRST}))
    return "holds 1 tensors this model does not have: 'model.decoder.layers.0.mlp.bias'"


@broken
def fewer_layers_than_weights(d: Path) -> str:
    kinds = ["full_attention"] * 2
    edit_config(d, lambda c: c["text_config"].update(num_hidden_layers=2, layer_types=kinds))
    for name in ("per_layer_config", "global_head_dim", "num_global_key_value_heads"):
        edit_config(d, lambda c, name=name: c["text_config"].pop(name, None))
    return "do not belong together"


# --- config.json


@broken
def config_is_truncated(d: Path) -> str:
    (d / "config.json").write_text((d / "config.json").read_text()[:50])
    return "not valid JSON"


@broken
def config_is_a_list(d: Path) -> str:
    (d / "config.json").write_text("[]")
    return "not a JSON object"


@broken
def config_of_another_model(d: Path) -> str:
    edit_config(d, lambda c: c.update(model_type="gemma3"))
    return "model_type is 'gemma3'"


@broken
def config_untied(d: Path) -> str:
    edit_config(d, lambda c: c.update(tie_word_embeddings=False))
    return "tie_word_embeddings is False"


@broken
def config_quantized(d: Path) -> str:
    edit_config(d, lambda c: c.update(quantization_config={"quant_method": "awq"}))
    return "awq: bits is None"


@broken
def config_without_text(d: Path) -> str:
    edit_config(d, lambda c: c.pop("text_config"))
    return "text_config is missing"


@broken
def hidden_size_of_text(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(hidden_size="64"))
    return "must be a whole number"


@broken
def hidden_size_absurd(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(hidden_size=10**15))
    return "hidden_size is 1000000000000000"


@broken
def no_experts(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].pop("num_experts"))
    return "lacks 'num_experts'"


@broken
def more_chosen_than_experts(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(top_k_experts=99))
    return "top_k_experts is 99"


@broken
def unknown_layer_type(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(layer_types=["linear_attention"] * 3))
    return "linear_attention"


@broken
def million_layers(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(num_hidden_layers=10**6, layer_types=None))
    return "1 to 1024"


@broken
def override_of_an_unknown_field(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"]["per_layer_config"].update({"1": {"window": 3}}))
    return "sets 'window'"


@broken
def override_of_an_absent_layer(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"]["per_layer_config"].update({"77": {}}))
    return "does not name a layer"


@broken
def uneven_kv_heads(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(num_key_value_heads=3))
    return "cannot share"


@broken
def unknown_rope(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"]["rope_parameters"]["full_attention"].update(rope_type="yarn"))
    return "rope_type 'yarn'"


@broken
def other_activation(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(hidden_activation="silu"))
    return "hidden_activation is 'silu'"


@broken
def bidirectional_encoder(d: Path) -> str:
    edit_config(d, lambda c: c["text_config"].update(use_bidirectional_attention="all"))
    return "encode is causal"
