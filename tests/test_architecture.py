"""Imports go one way, packages import only what they may, torch stays out of the files that need none."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "dgemma"

# Each package may import itself and the packages it names; docs/architecture.md says why.
PACKAGES: dict[str, set[str]] = {
    "errors": set(),
    "params": {"errors"},
    "events": set(),
    "durable_files": {"errors"},
    "worker_process": {"errors"},
    "gguf_file": {"errors"},
    "machine": set(),
    "images": {"errors", "worker_process"},
    "sudoku": {"errors"},
    "forms": {"errors", "events", "structured_output"},
    "kernels": {"errors"},
    "model": {"errors", "kernels"},
    "sampling": {"errors", "params", "kernels"},
    "text": {"errors", "events", "worker_process", "images", "gguf_file"},
    "structured_output": {"errors", "text"},
    "checkpoint": {"errors", "durable_files", "machine", "model", "images", "gguf_file"},
    "engine": {
        "errors", "params", "events", "machine", "model", "sampling", "text", "structured_output", "images",
    },
    "tasks": {"errors", "params", "events", "text", "structured_output", "engine"},
    "trace": {"errors", "params", "events", "durable_files", "model", "engine", "structured_output"},
    "loaded_model": {"errors", "params", "model", "text", "checkpoint", "forms", "images"},
    "language_model": {
        "errors", "params", "events", "machine", "model", "sampling", "text", "structured_output",
        "checkpoint", "engine", "tasks", "forms", "trace", "images", "loaded_model",
    },
    "loading": {"errors", "model", "checkpoint", "engine", "language_model"},
    "training": {
        "errors", "params", "events", "durable_files", "machine", "model", "sampling", "text", "checkpoint",
        "language_model", "loading",
    },
    "evaluation": {
        "errors", "params", "events", "durable_files", "text", "language_model", "loading", "sudoku",
    },
    "bench": {"errors", "events", "model", "checkpoint", "sampling", "language_model", "loading"},
    "scale": {"errors", "machine", "events", "checkpoint", "engine"},
    "plan": {"errors", "params", "model", "engine", "language_model", "bench", "scale"},
    "selfcheck": {"checkpoint", "language_model", "loading", "machine", "model"},
    "conform": {
        "errors", "params", "events", "model", "sampling", "checkpoint", "trace", "language_model", "loading",
        "bench", "selfcheck",
    },
    "server": {
        "errors", "params", "events", "durable_files", "worker_process", "text", "structured_output",
        "engine", "tasks", "trace", "images",
        "__init__",
    },
    "service": {"engine", "language_model", "server"},
    "ray": {
        "errors", "machine", "checkpoint", "engine", "loading", "scale", "server", "service",
    },
    "cli": {
        "service", "ray", "gguf_file",
        "errors", "params", "events", "durable_files", "machine", "kernels", "model", "structured_output",
        "checkpoint", "engine", "tasks", "images",
        "selfcheck", "training", "evaluation", "bench", "scale", "sudoku", "forms", "trace", "conform",
        "plan", "server", "__init__",
    },
    "__init__": {
        "errors", "params", "events", "model", "sampling", "tasks", "forms", "trace", "language_model",
        "loading", "images",
    },
}  # fmt: skip
TORCH_FREE_PACKAGES = (
    "text", "sudoku", "forms", "server", "tasks", "structured_output", "trace", "plan", "images",
)  # fmt: skip
TORCH_FREE = [
    "errors.py", "params.py", "events.py", "durable_files.py", "worker_process.py", "machine.py",
    "model/config.py", "model/config_fields.py", "model/vision_config.py", "model/model_part.py",
    "checkpoint/division.py",
    "gguf_file.py",
    "scale/replicated_engine.py", "scale/prefix_routes.py", "scale/autoscaling.py",
    "checkpoint/hub.py", "checkpoint/hub_cache.py",
    "checkpoint/names.py", "checkpoint/gguf_names.py", "checkpoint/gguf_source.py", "checkpoint/presets.py",
    "checkpoint/parameter_count.py", "checkpoint/source.py",
    "checkpoint/safetensors_file.py", "checkpoint/adapter_source.py", "checkpoint/adapter_config.py",
    "training/report.py", "training/callbacks.py", "training/curves.py", "training/data/stream.py",
    "training/data/sources.py", "training/data/records.py", "training/data/jsonl.py",
    "training/data/parquet.py", "training/data/dataset_formats.py",
    "training/data/order.py",
    "training/data/text_windows.py", "__init__.py", "bench/server_bench.py", "bench/server_client.py",
    "bench/playbooks.py", "bench/devices.py", "bench/predict.py", "bench/predict_page.py",
    "checkpoint/bundled.py", "engine/block_pool.py", "engine/prefix_cache.py", "engine/kv_cache_manager.py",
    "engine/scheduler.py", "engine/service.py", "engine/request.py", "engine/request_images.py",
    *(str(f.relative_to(SOURCE)) for p in TORCH_FREE_PACKAGES for f in (SOURCE / p).rglob("*.py")),
]  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(module: str) -> str:
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
    package = path.parts[0].removesuffix(".py")
    for module in imports(file):
        if module == "dgemma" or module.startswith("dgemma."):
            assert package_of(module) in PACKAGES[package] | {package}, f"{path} imports {module}"


def test_every_package_is_listed() -> None:
    packages = {f.relative_to(SOURCE).parts[0].removesuffix(".py") for f in FILES}
    assert packages == set(PACKAGES)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_free_files_stay_torch_free(name: str) -> None:
    tree = ast.parse((SOURCE / name).read_text())
    top_level = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("torch" in ast.dump(node) for node in top_level)


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_each_file_begins_with_what_it_is_for(file: Path) -> None:
    assert file.read_text().lstrip().startswith('"""')


def test_no_device_specific_or_float64_code_in_the_model() -> None:
    """bf16 on CPU, CUDA and mps: nothing that only one device has."""
    for file in (SOURCE / "model").glob("*.py"):
        text = file.read_text()
        assert not re.search(r"float64|\.double\(|torch\.cuda\.|torch\.mps", text), file


def test_importing_dgemma_imports_no_torch() -> None:
    code = "import dgemma, dgemma.cli.main, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_class_names_are_unique() -> None:
    found: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}
