"""The notebook of the examples runs from its first to its last cell, and is kept without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "canvas.ipynb"


def test_it_is_kept_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


def test_it_runs_and_shows_its_figures(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    client = NotebookClient(notebook, timeout=500)
    kernel = client.create_kernel_manager()
    kernel.transport, kernel.ip = "ipc", str(tmp_path / "kernel")  # sockets in a directory of ours, no port
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join(output.get("text", "") for output in outputs)
    assert "solved: True" in printed
    assert printed.count("of cells") == 4
    assert not [output for output in outputs if output.get("name") == "stderr"], outputs
