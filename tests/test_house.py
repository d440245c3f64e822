"""The house: imports go one way, rooms know only what they may, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dgemma"

# Each room may import itself and the rooms it names; docs/architecture.md says why.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "params": {"errors"},
    "events": set(),
    "given": {"errors"},
    "sudoku": {"errors"},
    "model": {"errors"},
    "diffusion": {"errors"},
    "text": {"errors", "events"},
    "constraint": {"errors", "text"},
    "checkpoint": {"errors", "model"},
    "machine": set(),
    "generation": {"errors", "params", "events", "given", "model", "diffusion", "text"},
    "engine": {
        "errors",
        "params",
        "events",
        "given",
        "model",
        "diffusion",
        "text",
        "constraint",
        "machine",
        "generation",
    },
    "canvas": {"errors", "params", "events", "given", "text", "constraint", "engine"},
    "language_model": {
        "canvas",
        "errors",
        "params",
        "events",
        "given",
        "model",
        "diffusion",
        "text",
        "constraint",
        "checkpoint",
        "generation",
        "engine",
    },
    "training": {
        "errors",
        "events",
        "model",
        "diffusion",
        "text",
        "checkpoint",
        "machine",
        "language_model",
    },
    "evaluation": {"errors", "params", "events", "text", "language_model", "sudoku"},
    "bench": {"events", "language_model"},
    "selfcheck": {"checkpoint", "language_model", "machine", "model"},
    "server": {"errors", "params", "events", "given", "text", "constraint", "engine", "canvas", "__init__"},
    "cli": {
        "canvas",
        "constraint",
        "errors",
        "params",
        "events",
        "model",
        "checkpoint",
        "machine",
        "selfcheck",
        "training",
        "evaluation",
        "bench",
        "sudoku",
        "engine",
        "server",
        "__init__",
    },
    "__init__": {"errors", "params", "events", "model", "diffusion", "canvas", "language_model"},
}
TORCH_FREE_ROOMS = ("text", "sudoku", "server", "canvas", "constraint")
TORCH_FREE = [
    "errors.py", "params.py", "events.py", "given.py", "machine.py", "model/config.py", "checkpoint/hub.py",
    "checkpoint/names.py", "checkpoint/presets.py", "checkpoint/census.py", "checkpoint/source.py",
    "checkpoint/safetensors_file.py", "checkpoint/adapter_source.py", "checkpoint/adapter_config.py",
    "training/example.py", "training/report.py", "training/event_file.py", "training/curves.py",
    "training/stream.py", "training/sources.py", "training/records.py", "training/order.py", "__init__.py",
    "checkpoint/bundled.py", "engine/pages.py", "engine/prefix.py", "engine/memory.py", "engine/capacity.py",
    "engine/scheduler.py", "engine/service.py",
    *(str(f.relative_to(SOURCE)) for r in TORCH_FREE_ROOMS for f in (SOURCE / r).glob("*.py")),
]  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_only_go_up_the_list(file: Path) -> None:
    path = file.relative_to(SOURCE)
    room = path.parts[0].removesuffix(".py")
    for module in imports(file):
        if module == "dgemma" or module.startswith("dgemma."):
            assert room_of(module) in ROOMS[room] | {room}, f"{path} imports {module}"


def test_every_room_is_listed() -> None:
    rooms = {f.relative_to(SOURCE).parts[0].removesuffix(".py") for f in FILES}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_free_files_stay_torch_free(name: str) -> None:
    tree = ast.parse((SOURCE / name).read_text())
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("torch" in ast.dump(node) for node in top_level)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_files_stay_readable(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 500
    assert text.lstrip().startswith('"""'), "each file begins with what it is for"


def test_no_device_specific_or_float64_code_in_the_model() -> None:
    """bf16 on CPU, CUDA and mps: nothing that only one device has."""
    for file in (SOURCE / "model").glob("*.py"):
        text = file.read_text()
        assert not re.search(r"float64|\.double\(|torch\.cuda\.|torch\.mps", text), file


def test_importing_dgemma_imports_no_torch() -> None:
    code = "import dgemma, dgemma.cli.main, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
