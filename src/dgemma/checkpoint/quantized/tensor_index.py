"""Find the tensors of quantized weights in a checkpoint. Imports no torch.

Quantization tools split expert weights into modules: `experts.gate_up_proj` of the released layout becomes a
gate and an up projection of every expert. Of a tied weight they keep any one of its names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dgemma.checkpoint.names import TensorSpec
from dgemma.checkpoint.quantized.schemes import QuantizationScheme
from dgemma.checkpoint.safetensors_file import TensorEntry
from dgemma.errors import CheckpointError

_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Scales for runtimes with an 8-bit KV cache. This one has none. ModelOpt writes both even without a v_proj.
_KV_CACHE_SCALES = ("k_proj.k_scale", "v_proj.v_scale", "q_scale", "k_scale", "v_scale")
Tied = list[tuple[TensorEntry, TensorEntry]]


@dataclass(frozen=True)
class QuantizedModule:
    """One quantized linear: a matrix, or some rows of one expert."""

    module: str
    entries: dict[str, TensorEntry]  # by part


@dataclass(frozen=True)
class QuantizedEntry:
    """A quantized matrix (one module), or expert weights (the modules of expert 0, of expert 1, ...)."""

    scheme: QuantizationScheme
    shape: tuple[int, ...]
    modules: list[QuantizedModule] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for module in self.modules for entry in module.entries.values())

    @property
    def module_shape(self) -> tuple[int, int]:
        *experts, out, inner = self.shape
        return out * (experts[0] if experts else 1) // len(self.modules), inner


def module_names(spec: TensorSpec) -> Iterator[list[str]]:
    """The modules that a weight may be split into, once for each name of the weight."""
    for name in (spec.name, *spec.tied_names):
        if len(spec.shape) == 2:
            yield [name.removesuffix(".weight")]
        elif len(spec.shape) == 3:
            parent, _, leaf = name.rpartition(".")
            yield [f"{parent}.{e}.{half}" for e in range(spec.shape[0]) for half in expert_halves(leaf)]


def expert_halves(leaf: str) -> tuple[str, ...]:
    """The modules that quantization tools split a projection of one expert into."""
    return _HALVES[leaf]


def take_quantized(
    spec: TensorSpec, found: dict[str, TensorEntry], schemes: tuple[QuantizationScheme, ...], tied: Tied
) -> QuantizedEntry | None:
    """Remove the tensors of a quantized weight from `found`; None if no scheme matches.

    Copies under a tied name are removed too, and added to `tied`.
    """
    _drop_kv_cache_scales(spec, found)
    taken: QuantizedEntry | None = None
    for modules in module_names(spec):
        inner = spec.shape[-1]
        scheme = _scheme_of(modules[0], spec.size // inner // len(modules), inner, found, schemes)
        if scheme is None:
            continue
        entry = QuantizedEntry(
            scheme, spec.shape, [QuantizedModule(m, _take(m, scheme, found)) for m in modules]
        )
        _check(entry)
        if taken is None:
            taken = entry
        else:
            tied.extend(_tied_pairs(taken, entry))
    return taken


def _drop_kv_cache_scales(spec: TensorSpec, found: dict[str, TensorEntry]) -> None:
    if spec.path.endswith(".attention.key.weight"):
        for name in (spec.name, *spec.tied_names):
            for scale in _KV_CACHE_SCALES:
                found.pop(f"{name.removesuffix('k_proj.weight')}{scale}", None)


def _scheme_of(
    module: str, out: int, inner: int, found: dict[str, TensorEntry], schemes: tuple[QuantizationScheme, ...]
) -> QuantizationScheme | None:
    """The scheme of a linear: of several candidates the one that fits best, of equals the first."""

    def fit(scheme: QuantizationScheme) -> int:
        score = 0
        for name, part in scheme.parts(out, inner).items():
            entry = found.get(f"{module}.{name}")
            if entry is not None and entry.dtype in part.dtypes and entry.shape in part.shapes:
                score += 1
            elif entry is not None or name not in scheme.optional:
                score -= 1
        return score

    def may_be(scheme: QuantizationScheme) -> bool:
        # A plain weight may have the same name, but has another dtype.
        main = found.get(f"{module}.{scheme.main}")
        return main is not None and main.dtype in scheme.parts(out, inner)[scheme.main].dtypes

    return max(filter(may_be, schemes), key=fit, default=None)


def _take(module: str, scheme: QuantizationScheme, found: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    for part in scheme.ignored:
        found.pop(f"{module}.{part}", None)
    entries = {}
    for part in scheme.parts(64, 64):
        entry = found.pop(f"{module}.{part}", None)
        if entry is not None:
            entries[part] = entry
        elif part not in scheme.optional:
            raise scheme.refuse(f"{module!r} lacks {part!r}; the file is incomplete, or of another recipe.")
    return entries


def _check(entry: QuantizedEntry) -> None:
    scheme, (out, inner) = entry.scheme, entry.module_shape
    if inner % scheme.unit:
        raise scheme.refuse(
            f"{entry.modules[0].module!r} has rows of {inner}, which are not whole groups of {scheme.unit}."
        )
    expected = scheme.parts(out, inner)
    for module in entry.modules:
        for part, found in module.entries.items():
            if found.dtype not in expected[part].dtypes:
                known = " or ".join(expected[part].dtypes)
                raise scheme.refuse(f"{found.name!r} is stored as {found.dtype}; this format has {known}.")
            first = entry.modules[0].entries.get(part, found)
            if found.dtype != first.dtype:  # they become one tensor
                raise scheme.refuse(
                    f"{found.name!r} is stored as {found.dtype}, but {first.name!r} as {first.dtype}."
                )
            if found.shape not in expected[part].shapes:
                known = " or ".join(str(list(shape)) for shape in expected[part].shapes)
                raise scheme.refuse(
                    f"{found.name!r} has shape {list(found.shape)}; config.json requires {known}. The group "
                    "size or the geometry is another one."
                )


def _tied_pairs(first: QuantizedEntry, copy: QuantizedEntry) -> Tied:
    if first.scheme != copy.scheme:
        one, other = first.modules[0].module, copy.modules[0].module
        raise CheckpointError(f"{one!r} and its tied copy {other!r} are quantized differently.")
    return [
        (one.entries[part], other.entries[part])
        for one, other in zip(first.modules, copy.modules, strict=True)
        for part in one.entries.keys() & other.entries.keys()
    ]
