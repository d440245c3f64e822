"""Open and check an adapter directory in PEFT's layout, without loading tensors. Imports no torch.

`adapter_model.safetensors` has `lora_A` [rank, in] and `lora_B` [out, rank] of each linear. PEFT concatenates
the experts' factors: `lora_A` [experts * rank, in] expert by expert, `lora_B` [out, rank *
experts] rank by rank; with both expert weights adapted, the name of `gate_up_proj` has
one more `base_layer`.

The reference implementation has two modules for a weight that both passes share, and PEFT adapts modules, so
the file has the same factors twice. One copy alone is used for both; copies that differ are refused. (For the
same reason PEFT's own merging adds twice to a shared weight: merge with `dgemma merge`.)
`dgemma_adapter.json` beside them names the base of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dgemma.checkpoint.adapter_config import AdapterConfig
from dgemma.checkpoint.names import TensorSpec, tensor_specs
from dgemma.checkpoint.safetensors_file import TensorEntry, read_entries, same_content
from dgemma.checkpoint.source import FLOAT_DTYPES, read_json
from dgemma.errors import CheckpointError, suggestion
from dgemma.model.config import ModelConfig

CONFIG, WEIGHTS, DGEMMA_CONFIG = "adapter_config.json", "adapter_model.safetensors", "dgemma_adapter.json"


@dataclass(frozen=True)
class FactorEntries:
    """The file entries of the two LoRA factors of one weight, with rank and alpha."""

    down: TensorEntry
    up: TensorEntry
    shape: tuple[int, ...]  # of the weight
    rank: int
    alpha: float


@dataclass(frozen=True)
class AdapterSource:
    """An adapter on disk, checked against a model's geometry. No tensor is loaded."""

    path: Path
    factors: dict[str, FactorEntries]  # by the path of the weight in `Transformer`
    tied: list[tuple[TensorEntry, TensorEntry]] = field(repr=False)  # (first, copy)
    base_fingerprint: str | None  # None: not written by dgemma


@dataclass(frozen=True)
class Target:
    """One of the names that a weight has in the file."""

    spec: TensorSpec
    name: str
    module: str

    def key(self, factor: str) -> str:
        return f"base_model.model.{self.module}.lora_{factor}.weight"

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        *experts, out, inner = self.spec.shape
        wide = rank * (experts[0] if experts else 1)
        return {"A": (wide, inner), "B": (out, wide)}

    @property
    def path(self) -> str:
        return self.spec.path.removesuffix(".weight")


def open_adapter(path: str | Path, config: ModelConfig) -> AdapterSource:
    """Read the configuration and header of an adapter, and refuse one that does not fit `config`."""
    directory = Path(path)
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory} has no {CONFIG}; give the directory of an adapter.")
    adapter = AdapterConfig.from_json(read_json(directory / CONFIG), directory / CONFIG)
    if not (directory / WEIGHTS).exists() and (directory / "adapter_model.bin").exists():
        raise CheckpointError(
            f"{directory} holds 'adapter_model.bin', a pickle file, which can run code when opened. "
            "dgemma reads safetensors only: save the adapter again in PEFT."
        )
    found = {entry.name: entry for entry in read_entries(directory / WEIGHTS)}
    targets = list(targets_of(config, adapter))
    known = {target.key(factor): target for target in targets for factor in "AB"}
    _refuse_unknown(directory, [name for name in found if name not in known], list(known))
    factors: dict[str, FactorEntries] = {}
    tied: list[tuple[TensorEntry, TensorEntry]] = []
    for target in targets:
        keys = [target.key(factor) for factor in "AB"]
        if adapter.modules is None and not any(key in found for key in keys):
            continue  # without a list of names, the tensors of the file determine what is adapted
        one = _entries(directory, adapter, target, found)
        first = factors.setdefault(target.path, one)
        if first is not one:
            tied += [(first.down, one.down), (first.up, one.up)]
            if first.alpha != one.alpha:
                raise _untied(directory / CONFIG, f"the alpha of {target.name!r}")
    if not factors:
        raise CheckpointError(f"{directory} adapts nothing; {CONFIG} names no part of this model.")
    return AdapterSource(directory, factors, tied, _base_fingerprint(directory))


def check_tied_factors(source: AdapterSource) -> None:
    """Refuse factors that differ between the passes: both passes share their weights."""
    for first, copy in source.tied:
        if not same_content(first, copy):
            raise _untied(copy.file, repr(copy.name))


def targets_of(config: ModelConfig, adapter: AdapterConfig) -> Iterator[Target]:
    """Every name of every linear and expert weight that the adapter's configuration names."""
    for spec in tensor_specs(config):
        if len(spec.shape) < 2 or spec.part == "embedding":
            continue
        for full_name in (spec.name, *spec.tied_names):
            name = full_name.removesuffix(".weight")
            is_parameter = len(spec.shape) == 3
            if not adapter.names(name, is_parameter=is_parameter):
                continue
            module = name
            if is_parameter:
                module, _, leaf = name.rpartition(".")
                if leaf == "gate_up_proj" and adapter.names(f"{module}.down_proj", is_parameter=True):
                    module += ".base_layer"
            yield Target(spec, name, module)


def _entries(
    directory: Path, adapter: AdapterConfig, target: Target, found: dict[str, TensorEntry]
) -> FactorEntries:
    rank = adapter.rank_of(target.name)
    for factor, shape in target.shapes(rank).items():
        key = target.key(factor)
        if key not in found:
            raise CheckpointError(
                f"{directory} lacks the tensor {key!r}, which {CONFIG} requires. The adapter is incomplete."
            )
        entry = found[key]
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {key!r} has shape {list(entry.shape)}; rank {rank} on a weight of "
                f"{list(target.spec.shape)} requires {list(shape)}. The adapter belongs to another model or "
                f"to another {CONFIG}."
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{entry.file}: tensor {key!r} is stored as {entry.dtype}; supported: "
                f"{', '.join(FLOAT_DTYPES)}."
            )
    down, up = (found[target.key(factor)] for factor in "AB")
    return FactorEntries(down, up, target.spec.shape, rank, adapter.alpha_of(target.name))


def _refuse_unknown(directory: Path, extra: list[str], known: list[str]) -> None:
    if extra:
        raise CheckpointError(
            f"{directory} holds {len(extra)} tensors that {CONFIG} or this model does not name, first "
            f"{extra[0]!r}{suggestion(extra[0], known)} The adapter belongs to another model."
        )


def _untied(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {what} differs between encoder and decoder, but this model has one weight for both. "
        "Train it with dgemma, or copy one module's factors over the other's."
    )


def _base_fingerprint(directory: Path) -> str | None:
    if not (directory / DGEMMA_CONFIG).is_file():
        return None
    found = read_json(directory / DGEMMA_CONFIG).get("base_fingerprint")
    if not isinstance(found, str):
        raise CheckpointError(f"{directory / DGEMMA_CONFIG} has no base_fingerprint; it is corrupt.")
    return found
