"""The VS Code extension's own tests pass: `editors/vscode/test/`, with a fake of `vscode`."""

from __future__ import annotations

import json

import pytest

from editors.node_process import EXTENSION, NO_NODE, NODE, run_tests

ROOT = EXTENSION.parents[1]
PACKAGE = json.loads((EXTENSION / "package.json").read_text())


@pytest.mark.skipif(NODE is None, reason=NO_NODE)
def test_the_extensions_own_tests_pass() -> None:
    files = sorted((EXTENSION / "test").glob("*.test.js"))
    assert run_tests(*files) >= sum(file.read_text().count("\ntest(") for file in files) > 0


def test_it_needs_nothing_at_run_time() -> None:
    assert "dependencies" not in PACKAGE
    assert (EXTENSION / PACKAGE["main"]).is_file()


def test_the_page_names_every_command_and_setting() -> None:
    page = (ROOT / "docs" / "editors.md").read_text()
    contributed = PACKAGE["contributes"]
    named = [f"dgemma: {command['title']}" for command in contributed["commands"]]
    named += [f"`{name}`" for name in contributed["configuration"]["properties"]]
    assert [name for name in named if name not in page] == []
