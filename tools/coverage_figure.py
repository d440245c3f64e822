"""The figure of a coverage run, by package, as a dated result file: `make coverage`.

python -m tools.coverage_figure TESTS...       after `coverage json`; TESTS: what was run
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

from benchmarks import record

REPORT = Path(__file__).parent.parent / "build/coverage/coverage.json"


def package_of(file: str) -> str:
    """`text` of `src/dgemma/text/tokenizer.py`; a module of dgemma itself stands alone."""
    parts = PurePath(file).parts
    return parts[parts.index("dgemma") + 1].removesuffix(".py")


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """Percentages of lines, and of lines and branches together, of all and of each package."""
    counts: dict[str, Counter[str]] = {"all": Counter()}
    for file, found in report["files"].items():
        summary = Counter(
            {name: value for name, value in found["summary"].items() if name.startswith(("num_", "covered_"))}
        )
        for name in ("all", package_of(file)):
            counts[name] = counts.get(name, Counter()) + summary
    return {
        name: {
            "lines": found["num_statements"],
            "lines_percent": percent(found["covered_lines"], found["num_statements"]),
            "branches": found["num_branches"],
            "percent": percent(
                found["covered_lines"] + found["covered_branches"],
                found["num_statements"] + found["num_branches"],
            ),
        }
        for name, found in counts.items()
        if found["num_statements"]
    }


def percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 100.0


def main() -> None:
    findings = {"tests": sys.argv[1:], **figures(json.loads(REPORT.read_text()))}
    record.write("coverage", findings, module="tools.coverage_figure")


if __name__ == "__main__":
    main()
