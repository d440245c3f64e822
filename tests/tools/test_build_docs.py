"""The documentation's site: links that leave it are rewritten, wrong ones are found, nothing is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dgemma
from dgemma.cli.main import COMMANDS
from tools import build_docs
from tools.build_docs import commands_page, pages_of, problems_of, project, stage, unlisted, with_links_inside
from tools.docstring_lists import with_list

PYTHON = (build_docs.ROOT / "docs" / "reference" / "python.md").read_text()


@pytest.mark.parametrize(
    ("source", "page", "text", "found"),
    [
        ("SECURITY.md", "security.md", "[docs/scale.md](docs/scale.md#a)", "[docs/scale.md](scale.md#a)"),
        ("docs/a.md", "a.md", "[safe](../SECURITY.md)", "[safe](security.md)"),
        ("docs/tutorials/a.md", "tutorials/a.md", "[b](../b.md)", "[b](../b.md)"),
        ("docs/a.md", "a.md", "![b](b.svg)", "![b](b.svg)"),
        ("docs/a.md", "a.md", "[card](../recipes/x/CARD.md)", "card (`recipes/x/CARD.md`)"),
        ("docs/a.md", "a.md", "[`src/x.py`](../src/x.py)", "`src/x.py`"),
        (
            "docs/a.md",
            "a.md",
            "[x](https://example.com/a.md) [y](#z)",
            "[x](https://example.com/a.md) [y](#z)",
        ),
    ],
)
def test_links_are_of_the_site_or_become_paths(source: str, page: str, text: str, found: str) -> None:
    assert with_links_inside(text, Path(source), Path(page)) == found


def site_of(tmp_path: Path, body: str) -> list[str]:
    (tmp_path / "other.html").write_text('<h2 id="here">x</h2>')
    (tmp_path / "index.html").write_text(f"<html>{body}</html>")
    return problems_of(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        '<a href="other.html#here">x</a><a href="#top" id="top">y</a><a href="https://example.com">z</a>',
        '<img src="data:image/png;base64,AA"><link rel="canonical" href="https://example.com/">',
    ],
)
def test_a_right_page_has_no_problem(tmp_path: Path, body: str) -> None:
    assert site_of(tmp_path, body) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="nowhere.html">x</a>', "links to nowhere.html, which does not exist"),
        ('<a href="other.html#there">x</a>', "links to other.html#there, which has no such anchor"),
        ('<img src="no.png">', "links to no.png"),
        ('<script src="https://unpkg.com/x.js"></script>', "loads https://unpkg.com/x.js"),
        ('<link rel="stylesheet" href="//fonts.example.com/a.css">', "loads //fonts.example.com/a.css"),
    ],
)
def test_what_leads_nowhere_or_loads_from_elsewhere_is_found(tmp_path: Path, body: str, problem: str) -> None:
    (found,) = site_of(tmp_path, body)
    assert problem in found


def test_a_page_outside_the_navigation_is_named(tmp_path: Path) -> None:
    for name in ("a.md", "sub/b.md", "sub/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# x")
    assert unlisted([{"A": "a.md"}, {"Group": [{"B": "sub/b.md"}]}], tmp_path) == ["sub/c.md"]


def test_every_entry_of_the_navigation_is_a_page_once(tmp_path: Path) -> None:
    stage(tmp_path / "docs")
    pages = list(pages_of(project()["nav"]))
    assert len(pages) == len(set(pages))
    assert [page for page in pages if not (tmp_path / "docs" / page).is_file()] == []


def test_the_reference_has_every_exported_name_and_every_command() -> None:
    documented = set(re.findall(r"^::: dgemma\.(\w+)$", PYTHON, re.MULTILINE))
    assert documented == set(dgemma.__all__) - {"__version__"}
    page = commands_page()
    assert [name for name in COMMANDS if f"## dgemma {name}\n" not in page] == []
    assert "--max-tokens" in page


def test_parameters_of_a_docstring_become_a_list_and_prose_stays() -> None:
    text = (
        "Load it.\n\npath, name: where; as\n    two lines.\nmesh: others.\n\n"
        "    lm.chat(x)  # note: a\nNote that a: b."
    )
    assert with_list(text) == (
        "Load it.\n\n\n- `path`, `name`: where; as\n    two lines.\n- `mesh`: others.\n\n"
        "    lm.chat(x)  # note: a\nNote that a: b."
    )
