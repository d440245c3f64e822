"""Where a quantized weight lies in a checkpoint. Imports no torch.

Quantizing tools take a bank of experts apart: what the released layout calls `experts.gate_up_proj` is a gate
and an up projection of every expert. They also keep whichever name of a tied weight they met first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dgemma.checkpoint.names import TensorSpec
from dgemma.checkpoint.quantized.formats import Format
from dgemma.checkpoint.safetensors_file import TensorEntry
from dgemma.errors import CheckpointError

_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# For a runtime that keeps its context in eight bits; ours does not. ModelOpt has both even without a v_proj.
_ABOUT_CONTEXT = ("k_proj.k_scale", "v_proj.v_scale", "q_scale", "k_scale", "v_scale")
Tied = list[tuple[TensorEntry, TensorEntry]]


@dataclass(frozen=True)
class Piece:
    """One quantized linear: a matrix, or some rows of one expert."""

    module: str
    entries: dict[str, TensorEntry]  # by part


@dataclass(frozen=True)
class CodedEntry:
    """A quantized matrix (one piece), or a bank (the pieces of expert 0, of expert 1, ...)."""

    form: Format
    shape: tuple[int, ...]
    pieces: list[Piece] = field(repr=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for piece in self.pieces for entry in piece.entries.values())

    @property
    def piece_shape(self) -> tuple[int, int]:
        *experts, out, inner = self.shape
        return out * (experts[0] if experts else 1) // len(self.pieces), inner


def module_names(spec: TensorSpec) -> Iterator[list[str]]:
    """The linears a weight may have been taken apart into, once for each name it may have."""
    for name in (spec.name, *spec.tied_names):
        if len(spec.shape) == 2:
            yield [name.removesuffix(".weight")]
        elif len(spec.shape) == 3:
            bank, _, leaf = name.rpartition(".")
            yield [f"{bank}.{e}.{half}" for e in range(spec.shape[0]) for half in _HALVES[leaf]]


def take_coded(
    spec: TensorSpec, found: dict[str, TensorEntry], formats: tuple[Format, ...], tied: Tied
) -> CodedEntry | None:
    """Take a quantized weight's tensors out of `found`; None if there are none of any format.

    Copies under a tied name are taken too, and added to `tied`.
    """
    _drop_context_scales(spec, found)
    taken: CodedEntry | None = None
    for modules in module_names(spec):
        inner = spec.shape[-1]
        form = _format_of(modules[0], spec.size // inner // len(modules), inner, found, formats)
        if form is None:
            continue
        entry = CodedEntry(form, spec.shape, [Piece(m, _take(m, form, found)) for m in modules])
        _check(entry)
        if taken is None:
            taken = entry
        else:
            tied.extend(_pairs(taken, entry))
    return taken


def _drop_context_scales(spec: TensorSpec, found: dict[str, TensorEntry]) -> None:
    if spec.path.endswith(".attention.key.weight"):
        for name in (spec.name, *spec.tied_names):
            for scale in _ABOUT_CONTEXT:
                found.pop(f"{name.removesuffix('k_proj.weight')}{scale}", None)


def _format_of(
    module: str, out: int, inner: int, found: dict[str, TensorEntry], formats: tuple[Format, ...]
) -> Format | None:
    """The format a linear's codes may be in; of several the one that fits best, of equals the first."""

    def fit(form: Format) -> int:
        score = 0
        for name, part in form.parts(out, inner).items():
            entry = found.get(f"{module}.{name}")
            if entry is not None and entry.dtype in part.dtypes and entry.shape in part.shapes:
                score += 1
            elif entry is not None or name not in form.optional:
                score -= 1
        return score

    def may_be(form: Format) -> bool:
        # Plain weights may have the same name; their type tells.
        main = found.get(f"{module}.{form.main}")
        return main is not None and main.dtype in form.parts(out, inner)[form.main].dtypes

    return max(filter(may_be, formats), key=fit, default=None)


def _take(module: str, form: Format, found: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    for part in form.ignored:
        found.pop(f"{module}.{part}", None)
    entries = {}
    for part in form.parts(64, 64):
        entry = found.pop(f"{module}.{part}", None)
        if entry is not None:
            entries[part] = entry
        elif part not in form.optional:
            raise form.refuse(f"{module!r} lacks {part!r}; the file is incomplete, or of another recipe.")
    return entries


def _check(entry: CodedEntry) -> None:
    form, (out, inner) = entry.form, entry.piece_shape
    if inner % form.unit:
        raise form.refuse(
            f"{entry.pieces[0].module!r} has rows of {inner}, which are not whole groups of {form.unit}."
        )
    expected = form.parts(out, inner)
    for piece in entry.pieces:
        for part, found in piece.entries.items():
            if found.dtype not in expected[part].dtypes:
                known = " or ".join(expected[part].dtypes)
                raise form.refuse(f"{found.name!r} is stored as {found.dtype}; this format has {known}.")
            first = entry.pieces[0].entries.get(part, found)
            if found.dtype != first.dtype:  # they will be one tensor
                raise form.refuse(
                    f"{found.name!r} is stored as {found.dtype}, but {first.name!r} as {first.dtype}."
                )
            if found.shape not in expected[part].shapes:
                known = " or ".join(str(list(shape)) for shape in expected[part].shapes)
                raise form.refuse(
                    f"{found.name!r} has shape {list(found.shape)}; config.json asks for {known}. The group "
                    "size or the geometry is another one."
                )


def _pairs(first: CodedEntry, copy: CodedEntry) -> Tied:
    if first.form != copy.form:
        one, other = first.pieces[0].module, copy.pieces[0].module
        raise CheckpointError(f"{one!r} and its tied copy {other!r} are quantized differently.")
    return [
        (one.entries[part], other.entries[part])
        for one, other in zip(first.pieces, copy.pieces, strict=True)
        for part in one.entries.keys() & other.entries.keys()
    ]
