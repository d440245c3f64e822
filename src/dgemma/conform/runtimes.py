"""The runtimes that can be compared, and an environment of its own for each."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dgemma.errors import DgemmaError, InputError

RUNNERS = Path(__file__).parent / "runners"


class OtherRuntimeError(DgemmaError):
    """The other runtime could not be installed or run."""


@dataclass(frozen=True)
class Runtime:
    """A runtime, how it is installed, and the script that runs a case with it."""

    name: str
    script: str
    requirements: tuple[str, ...]  # each pinned: name==version

    @property
    def versions(self) -> dict[str, str]:
        found = {}
        for requirement in self.requirements:
            name, _, version = requirement.partition("==")
            found[name.partition("[")[0]] = version
        return found

    def is_here(self) -> bool:
        """Whether this Python has these versions."""
        try:
            return all(
                importlib.metadata.version(name).partition("+")[0] == version
                for name, version in self.versions.items()
            )
        except importlib.metadata.PackageNotFoundError:
            return False

    def python(self, cache: Path | None = None) -> Path:
        """The Python to run it with: this one, or that of an environment, which is made if necessary."""
        if self.is_here():
            return Path(sys.executable)
        place = (cache or _cache()) / f"{self.name}-{'-'.join(self.versions.values())}"
        python = place / "bin" / "python"
        if not (place / "complete").is_file():
            _call([sys.executable, "-m", "venv", str(place)], f"{place} cannot be made")
            _call(
                [str(python), "-m", "pip", "install", "--quiet", *self.requirements],
                f"{self.name} cannot be installed",
            )
            (place / "complete").touch()
        return python

    def run(self, case: Path, python: Path) -> None:
        """Let it write `outputs.safetensors` into the directory of a case."""
        _call([str(python), str(RUNNERS / self.script), str(case)], f"{self.name} failed on {case.name}")


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("transformers", "run_transformers.py", ("torch==2.13.0", "transformers==5.22.2")),
        Runtime("mlx-vlm", "run_mlx.py", ("mlx[cpu]==0.32.4", "mlx-vlm==0.7.10")),
    )
}


def runtime_named(name: str) -> Runtime:
    if name not in RUNTIMES:
        raise InputError(f"RUNTIME is {name!r}; it must be one of {', '.join(RUNTIMES)}.")
    return RUNTIMES[name]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dgemma" / "conform"


def _call(command: list[str], otherwise: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)  # its own packages, not ours
    found = subprocess.run(  # noqa: S603  (our own scripts and pip)
        command, capture_output=True, text=True, env=environment, check=False
    )
    if found.returncode:
        last = "\n".join(found.stderr.strip().splitlines()[-6:])
        raise OtherRuntimeError(f"{otherwise}:\n{last}")
