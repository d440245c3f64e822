"""The threat model names a test for each row, and the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def rows() -> list[list[str]]:
    section = (ROOT / "SECURITY.md").read_text().partition("## Threat model\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_row_is_whole_and_names_tests_that_exist() -> None:
    found = rows()
    assert len(found) >= 15
    for row in found:
        *words, proof = row
        assert len(words) == 4, row
        assert all(words), row
        files = re.findall(r"\]\((tests/\S+)\)", proof)
        assert files, row
        for file in files:
            assert re.search("^def test_|^    def test_", (ROOT / file).read_text(), re.MULTILINE), file


def test_every_target_of_the_fuzzer_is_told_of() -> None:
    from tools.fuzz_targets import TARGETS

    told = (ROOT / "docs" / "trust.md").read_text()
    assert [name for name in TARGETS if f"`{name}`" not in told] == []
