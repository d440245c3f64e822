"""The runtimes that can be compared, and an environment of its own for each."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dgemma.errors import DgemmaError, InputError

RUNNERS = Path(__file__).parent / "runners"


class OtherRuntimeError(DgemmaError):
    """The other runtime did not run."""


class NotInstalledError(OtherRuntimeError):
    """There is no environment with the other runtime, and none can be made here."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime, how it is installed, and the script that runs a case with it."""

    name: str
    script: str
    requirements: tuple[str, ...]  # each pinned: name==version
    flags: tuple[str, ...] = ()  # of the script
    is_complete: bool = False  # the requirements name all packages: pip resolves nothing
    least_python: tuple[int, int] = (3, 11)
    repository: str | None = None  # of a runtime that is not packaged: the user has a copy
    package: str | None = None  # in that copy
    source: Path | None = None  # that copy

    @property
    def versions(self) -> dict[str, str]:
        found = {}
        for requirement in self.requirements:
            name, _, version = requirement.partition("==")
            found[name.partition("[")[0]] = version
        return found

    @property
    def report(self) -> dict[str, str]:
        """The versions of what matters, for people."""
        if self.source is None or self.package is None:
            return self.versions
        return {self.package: _version_of(self.source, self.package), **_some(self.versions, REPORTED)}

    def with_source(self, source: str | None) -> Runtime:
        if self.repository is None or self.package is None:
            if source is not None:
                raise InputError(f"--source is {source!r}; {self.name} is installed from its packages.")
            return self
        if source is None:
            raise InputError(
                f"{self.name} is in no package: get {self.repository}, and name the copy with --source DIR."
            )
        place = Path(source).absolute()
        if not (place / self.package / "__init__.py").is_file():
            raise InputError(f"--source is {source!r}; it must be a copy of {self.repository}.")
        return replace(self, source=place)

    def is_here(self) -> bool:
        """Whether this Python has these versions."""
        if sys.version_info[:2] < self.least_python:
            return False
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
        name = "-".join(_some(self.versions, REPORTED).values() or self.versions.values())
        place = (cache or _cache()) / f"{Path(self.script).stem.removeprefix('run_')}-{name}"
        python = place / "bin" / "python"
        if not (place / "complete").is_file():
            base = self._base_python()
            options = ["--no-deps"] if self.is_complete else []
            try:
                _call([str(base), "-m", "venv", str(place)], f"{place} cannot be made")
                _call(
                    [str(python), "-m", "pip", "install", "--quiet", *options, *self.requirements],
                    f"{self.name} cannot be installed",
                )
            except OtherRuntimeError as error:
                raise NotInstalledError(str(error)) from None
            (place / "complete").touch()
        return python

    def _base_python(self) -> Path:
        """This Python, or one on the path that is new enough."""
        for python in _pythons():
            if _python_version(python) >= self.least_python:
                return python
        least = ".".join(map(str, self.least_python))
        raise NotInstalledError(
            f"{self.name} needs Python {least} or newer, and none is on the path; "
            f"this is {sys.version_info[0]}.{sys.version_info[1]}."
        )

    def run(self, case: Path, python: Path) -> None:
        """Let it write `outputs.safetensors` into the directory of a case."""
        _call(
            [str(python), str(RUNNERS / self.script), str(case), *self.flags],
            f"{self.name} failed on {case.name}",
            source=self.source,
        )


REPORTED = ("jax", "flax")
_GEMMA_JAX = Runtime(
    name="gemma-jax",
    script="run_gemma_jax.py",
    requirements=tuple((RUNNERS / "gemma_jax_requirements.txt").read_text().split()),
    is_complete=True,
    least_python=(3, 12),
    repository="https://github.com/google-deepmind/gemma",
    package="gemma",
)
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime(
            name="transformers",
            script="run_transformers.py",
            requirements=("torch==2.13.0", "transformers==5.22.2"),
        ),
        Runtime(name="mlx-vlm", script="run_mlx.py", requirements=("mlx[cpu]==0.32.4", "mlx-vlm==0.7.10")),
        _GEMMA_JAX,
        replace(_GEMMA_JAX, name="gemma-jax-skip", flags=("--without-sliding-mask",)),
        replace(_GEMMA_JAX, name="gemma-jax-one-less", flags=("--without-sliding-mask", "--one-less")),
    )
}
# Why a runtime cannot be compared, where it might be expected.
REFUSED = {
    "vllm": "its build for CPUs refuses diffusion models, and the comparison runs on a CPU; start its server "
    "where it runs, and give the address",
}


def runtime_named(name: str) -> Runtime:
    if name in REFUSED:
        raise InputError(f"RUNTIME is {name!r}: {REFUSED[name]}.")
    if name not in RUNTIMES:
        names = ", ".join(RUNTIMES)
        raise InputError(
            f"RUNTIME is {name!r}; it must be one of {names}, or the address of a server: http://..."
        )
    return RUNTIMES[name]


def _some(versions: dict[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {name: versions[name] for name in names if name in versions}


def _version_of(source: Path, package: str) -> str:
    """As the package says, and the commit of the copy."""
    text = (source / package / "__init__.py").read_text(encoding="utf-8")
    said = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    commit = subprocess.run(  # noqa: S603  (git itself)
        ["git", "-C", str(source), "rev-parse", "--short=10", "HEAD"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return " at ".join(filter(None, (said[1] if said else "unknown", commit.stdout.strip())))


def _pythons() -> Iterator[Path]:
    yield Path(sys.executable)
    for minor in (12, 13, 14):
        found = shutil.which(f"python3.{minor}")
        if found is not None:
            yield Path(found)


def _python_version(python: Path) -> tuple[int, ...]:
    """() if it does not start, as a shim of a version that is not installed."""
    found = subprocess.run(  # noqa: S603  (an interpreter on the user's own path)
        [str(python), "-c", "import sys; print(*sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tuple(map(int, found.stdout.split())) if found.returncode == 0 else ()


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dgemma" / "conform"


def _call(command: list[str], otherwise: str, source: Path | None = None) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONPATH", None)  # its own packages, not ours
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    found = subprocess.run(  # noqa: S603  (our own scripts and pip)
        command, capture_output=True, text=True, env=environment, check=False
    )
    if found.returncode:
        last = "\n".join(found.stderr.strip().splitlines()[-6:])
        raise OtherRuntimeError(f"{otherwise}:\n{last}")
