"""Open and check a checkpoint, a directory or a GGUF file, without loading tensors. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dgemma.checkpoint.gguf_names import CHAT_TEMPLATE, TOKENIZER_JSON, gguf_name
from dgemma.checkpoint.gguf_source import GgufTensors, gguf_config, gguf_generation_config, gguf_in
from dgemma.checkpoint.names import VISION_PREFIXES, TensorSpec, tensor_specs, vision_specs
from dgemma.checkpoint.quantized.mlx import mlx_schemes, unstack_experts
from dgemma.checkpoint.quantized.quantization_config import schemes_from_config
from dgemma.checkpoint.quantized.schemes import QuantizationScheme
from dgemma.checkpoint.quantized.tensor_index import QuantizedEntry, take_quantized
from dgemma.checkpoint.safetensors_file import TensorEntry, read_entries, same_content
from dgemma.errors import CheckpointError, ConfigError, suggestion
from dgemma.gguf_file import is_gguf, read_gguf
from dgemma.model.config import ModelConfig

# Small files that are copied with the weights.
COMPANION_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "preprocessor_config.json", "record_types.json", "LICENSE", "README.md",
)  # fmt: skip
FLOAT_DTYPES = ("F32", "BF16", "F16")
_MAX_JSON_BYTES = 64 << 20
_MAX_EMBEDDED_BYTES = 128 << 20
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint on disk: its configuration and the file entry of each tensor."""

    path: Path  # its directory, or the GGUF file
    raw_config: dict[str, Any]
    config: ModelConfig
    entries: dict[str, TensorEntry]  # plain tensors, by their first released name
    quantized: dict[str, QuantizedEntry] = field(repr=False)  # quantized tensors, by the same name
    tied: list[tuple[TensorEntry, TensorEntry]] = field(repr=False)  # (first, copy)
    kept_aside: list[TensorEntry] = field(repr=False)  # tensors of the vision tower, copied as they are
    vision: dict[str, TensorEntry] = field(repr=False)  # of these, those that are loaded, by released name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are loaded."""
        plain = sum(entry.nbytes for entry in (*self.entries.values(), *self.vision.values()))
        return plain + sum(entry.nbytes for entry in self.quantized.values())

    @property
    def files(self) -> set[Path]:
        modules = (module for entry in self.quantized.values() for module in entry.modules)
        quantized = (entry for module in modules for entry in module.entries.values())
        return {entry.file for entry in (*self.entries.values(), *self.vision.values(), *quantized)}

    @property
    def quantized_from(self) -> str | None:
        """The fingerprint of the checkpoint that `dgemma quantize` made this one from."""
        metadata = self.raw_config.get("dgemma")
        found = metadata.get("quantized_from") if isinstance(metadata, dict) else None
        return found if isinstance(found, str) else None

    def require_plain(self, purpose: str) -> None:
        if self.quantized:
            scheme = next(iter(self.quantized.values())).scheme.name
            raise CheckpointError(
                f"{self.path} is quantized ({scheme}); {purpose} needs the plain checkpoint it was made from."
            )

    @property
    def companions(self) -> list[Path | EmbeddedFile]:
        """The small files, to be copied. A link out of the checkpoint is refused: it may lead to a secret.

        Of a GGUF file: those that it holds. Its directory may have files of other models.
        """
        if is_gguf(self.path):
            return list(_embedded_files(self.path))
        found = [self.path / name for name in COMPANION_FILES if (self.path / name).is_file()]
        home = self.path.resolve()
        # A hub cache links snapshots/REVISION/FILE to blobs/HASH.
        blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
        for file in found:
            target = file.resolve()
            if not target.is_relative_to(home) and target.parent != blobs:
                raise CheckpointError(
                    f"{file} is a link to {target}, outside of the checkpoint, and would be copied. Put the "
                    "file itself there, or remove the link."
                )
        return [*found]


@dataclass(frozen=True)
class EmbeddedFile:
    """A small file that a GGUF file holds."""

    name: str
    content: str = field(repr=False)

    def read_bytes(self) -> bytes:
        return self.content.encode()


def open_checkpoint(path: str | Path) -> CheckpointSource:
    """Read the configuration and the headers of a checkpoint, and refuse one that cannot be loaded."""
    directory = weights_path(path)
    if is_gguf(directory):
        return _open_gguf(directory)
    raw, config = read_config(directory)
    found = _read_index(directory)
    specs = list(tensor_specs(config))
    schemes = _schemes(directory, raw)
    unstack_experts(specs, found)
    entries: dict[str, TensorEntry] = {}
    quantized: dict[str, QuantizedEntry] = {}
    tied: list[tuple[TensorEntry, TensorEntry]] = []
    missing: list[str] = []
    for spec in specs:
        found_entry = take_quantized(spec, found, schemes, tied) if schemes else None
        if found_entry is not None:
            quantized[spec.name] = found_entry
            continue
        present = [found.pop(n) for n in (spec.name, *spec.tied_names) if n in found]
        if not present:
            missing.append(spec.name)
            continue
        for entry in present:
            _check_entry(entry, spec)
        entries[spec.name] = present[0]
        tied.extend((present[0], copy) for copy in present[1:])
    kept_aside = [e for name, e in found.items() if name.startswith(VISION_PREFIXES)]
    if not kept_aside:  # a model of text only, whatever config.json says
        config = replace(config, vision=None)
    vision: dict[str, TensorEntry] = {}
    for spec in vision_specs(config):
        if spec.name not in found:
            missing.append(spec.name)
            continue
        _check_entry(found[spec.name], spec)
        vision[spec.name] = found[spec.name]
    extra = [name for name in found if not name.startswith(VISION_PREFIXES)]
    _refuse_missing_and_extra(directory, missing, extra, [spec.name for spec in specs])
    return CheckpointSource(directory, raw, config, entries, quantized, tied, kept_aside, vision)


def _open_gguf(path: Path) -> CheckpointSource:
    raw, config = gguf_config(path)
    tensors = GgufTensors(read_gguf(path))
    specs = list(tensor_specs(config))
    entries: dict[str, TensorEntry] = {}
    quantized: dict[str, QuantizedEntry] = {}
    tied: list[tuple[TensorEntry, TensorEntry]] = []
    missing: list[str] = []
    for spec in specs:
        found = tensors.take(spec)
        if isinstance(found, TensorEntry):
            entries[spec.name] = found
        elif found is not None:
            quantized[spec.name] = found
        else:
            missing.append(gguf_name(spec.name))
    embedding = entries.get(specs[0].name) or quantized.get(specs[0].name)
    if embedding is not None and (pair := tensors.head(embedding)) is not None:
        tied.append(pair)
    _refuse_missing_and_extra(path, missing, tensors.names, [gguf_name(spec.name) for spec in specs])
    return CheckpointSource(path, raw, config, entries, quantized, tied, [], {})


def _embedded_files(path: Path) -> Iterator[EmbeddedFile]:
    gguf = read_gguf(path)
    for name, key in (("tokenizer.json", TOKENIZER_JSON), ("chat_template.jinja", CHAT_TEMPLATE)):
        content = gguf.text(key, max_bytes=_MAX_EMBEDDED_BYTES)
        if content is not None:
            yield EmbeddedFile(name, content)
    yield EmbeddedFile("generation_config.json", json.dumps(gguf_generation_config(path), indent=2) + "\n")


def weights_path(path: str | Path) -> Path:
    """`path`, or the one GGUF file of a directory that has no safetensors."""
    directory = Path(path)
    return (gguf_in(directory) if directory.is_dir() else None) or directory


def read_generation_config(path: Path) -> dict[str, Any] | None:
    """`generation_config.json` of a checkpoint, or what a GGUF file has of it; None where there is none."""
    file = path / "generation_config.json"
    if is_gguf(path):
        return gguf_generation_config(path)
    return read_json(file) if file.is_file() else None


def _schemes(directory: Path, raw: dict[str, Any]) -> tuple[QuantizationScheme, ...]:
    beside = directory / "hf_quant_config.json"  # of modelopt; its older versions write only this file
    if raw.get("quantization_config") is None and beside.is_file():
        raw = {"quantization_config": {"quant_method": "modelopt", **read_json(beside)}}
    try:
        return mlx_schemes(raw) or schemes_from_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from None


def read_config(path: str | Path) -> tuple[dict[str, Any], ModelConfig]:
    """The dictionary of a `config.json` and its ModelConfig. `path`: the file or its directory."""
    file = weights_path(path)
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; give the directory of a checkpoint.")
    if is_gguf(file):
        return gguf_config(file)
    if file.is_dir():
        file = file / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; it is not a checkpoint directory.")
    raw = read_json(file)
    try:
        return raw, ModelConfig.from_json(raw)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{file} is larger than 64 MiB; it is not a configuration.")
        raw = json.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise CheckpointError(f"{file} is not valid JSON; it is truncated or corrupt.") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is not a JSON object; it is corrupt.")
    return raw


def check_tied_copies(source: CheckpointSource) -> None:
    """Refuse a checkpoint whose copies of a tied tensor differ."""
    for first, copy in source.tied:
        if not same_content(first, copy):
            raise CheckpointError(
                f"{copy.file}: {copy.name!r} differs from {first.name!r}, but this model ties them. "
                "dgemma supports tied checkpoints only."
            )


def _read_index(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of all files, by name."""
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if single.exists():
        return {entry.name: entry for entry in read_entries(single)}
    if not index.is_file():
        pickles = sorted(f.name for f in directory.iterdir() if f.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{directory} holds {pickles[0]!r}, a pickle file, which can run code when opened. "
                "dgemma reads safetensors only: convert it first."
            )
        raise CheckpointError(f"{directory} has neither model.safetensors nor model.safetensors.index.json.")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; it is corrupt.")
    files: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        # Only plain names: an index must not reach outside its directory, or name what no file is called.
        plain = isinstance(file_name, str) and file_name == Path(file_name).name and file_name.isprintable()
        if not plain or not file_name.endswith(".safetensors") or "\\" in file_name:
            raise CheckpointError(
                f"{index}: tensor {name!r} points to {file_name!r}; only safetensors files beside "
                "the index are read."
            )
        files[file_name] = directory / file_name
    found: dict[str, TensorEntry] = {}
    for file_name in sorted(files):
        for entry in read_entries(files[file_name]):
            if entry.name in found:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in {found[entry.name].file.name} and in "
                    f"{file_name}; the shards are from different saves."
                )
            found[entry.name] = entry
    for name, file_name in weight_map.items():
        if name not in found or found[name].file.name != file_name:
            raise CheckpointError(
                f"{index} lists {name!r} in {file_name}, but it is not there; the shard is from another save."
            )
    return found


def _check_entry(entry: TensorEntry, spec: TensorSpec) -> None:
    if entry.shape != spec.shape:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} has shape {list(entry.shape)}; config.json requires "
            f"{list(spec.shape)}. Weights and config.json do not belong together."
        )
    if entry.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} is stored as {entry.dtype}; supported: "
            f"{', '.join(FLOAT_DTYPES)}."
        )


def _refuse_missing_and_extra(
    directory: Path, missing: list[str], extra: list[str], known: list[str]
) -> None:
    def some(names: list[str]) -> str:
        return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" * (len(names) > 3))

    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} tensors: {some(missing)}. "
            "The download is incomplete or config.json belongs to another model."
        )
    if extra:
        raise CheckpointError(
            f"{directory} holds {len(extra)} tensors this model does not have: {some(extra)}"
            f"{suggestion(extra[0], known)} Weights and config.json do not belong together."
        )
