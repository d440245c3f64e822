"""Run all cases with a runtime, and compare."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dgemma.checkpoint.hub import resolve
from dgemma.conform.case import make_case
from dgemma.conform.compare import Conformance, compare
from dgemma.conform.geometries import GEOMETRIES, Geometry, write_geometry
from dgemma.conform.runtimes import Runtime
from dgemma.loading import load
from dgemma.selfcheck import read_tensors


def conform(
    runtime: Runtime, model: str | None = None, geometries: Sequence[Geometry] = GEOMETRIES
) -> Iterator[Conformance]:
    """Each geometry, made on the spot; or one checkpoint."""
    python = runtime.python()
    with tempfile.TemporaryDirectory() as made:
        names: Sequence[Geometry | None] = geometries if model is None else [None]
        for number, geometry in enumerate(names):
            place = Path(made) / str(number)
            place.mkdir()
            if geometry is None:
                path = resolve(str(model))
                lm = load(path, dtype="float32", device="cpu")
                (place / "checkpoint").symlink_to(path.absolute())
            else:
                lm = write_geometry(geometry, place / "checkpoint")
            name = str(model) if geometry is None else geometry.name
            case = make_case(lm, name, seed=number)
            case.write(place)
            runtime.run(place, python)
            yield compare(name, case.expected, read_tensors(place / "outputs.safetensors"))
