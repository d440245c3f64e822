"""The figure of coverage adds up lines and branches by package."""

from __future__ import annotations

from typing import Any

from tools.coverage_figure import figures, package_of


def file_of(lines: int, covered: int, branches: int, taken: int) -> dict[str, Any]:
    return {
        "summary": {
            "num_statements": lines, "covered_lines": covered, "num_branches": branches,
            "covered_branches": taken, "percent_covered_display": "7",
        }
    }  # fmt: skip


def test_packages_add_up_to_the_whole() -> None:
    files = {
        "src/dgemma/text/a.py": file_of(10, 9, 4, 1),
        "src/dgemma/text/deep/b.py": file_of(10, 1, 0, 0),
        "src/dgemma/errors.py": file_of(20, 20, 0, 0),
        "src/dgemma/text/__init__.py": file_of(0, 0, 0, 0),
    }
    found = figures({"files": files})
    assert found["text"] == {"lines": 20, "lines_percent": 50.0, "branches": 4, "percent": 45.8}
    assert found["errors"] == {"lines": 20, "lines_percent": 100.0, "branches": 0, "percent": 100.0}
    assert found["all"] == {"lines": 40, "lines_percent": 75.0, "branches": 4, "percent": 70.5}


def test_a_module_of_its_own_is_a_package() -> None:
    assert package_of("/somewhere/src/dgemma/machine.py") == "machine"
