"""Build the documentation site: stage the pages, write the generated ones, build strictly, check the result.

    python -m tools.build_docs

Zensical's `--strict` checks links between pages. Images, generated pages and requests to other hosts it does
not check, so every page that was built is read once more.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

from dgemma.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "zensical.toml"
# Pages that stand outside docs/, where people look for them.
OUTSIDE = {"SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(CONFIG.read_text())["project"]
    return found


def pages_of(nav: list[Any]) -> Iterator[str]:
    """All pages that a navigation names, in order."""
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from pages_of(value)


def unlisted(nav: list[Any], target: Path) -> list[str]:
    """Pages that nobody would find: the navigation does not name them."""
    listed = set(pages_of(nav))
    return sorted(
        str(p.relative_to(target)) for p in target.rglob("*.md") if str(p.relative_to(target)) not in listed
    )


def stage(target: Path) -> None:
    """Copy docs/ and the pages outside of it, and write the reference of the commands."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for source, name in OUTSIDE.items():
        shutil.copy(ROOT / source, target / name)
    for page in target.rglob("*.md"):
        own = page.relative_to(target)
        source = next((s for s, name in OUTSIDE.items() if name == str(own)), str(Path("docs") / own))
        page.write_text(with_links_inside(page.read_text(), Path(source), own))
    (target / "reference" / "commands.md").write_text(commands_page())


def with_links_inside(text: str, source: Path, page: Path) -> str:
    """Links between staged pages as they will stand; a link to another file of the tree becomes its path."""

    def replaced(match: re.Match[str]) -> str:
        mark, shown, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if "://" in link or not path:
            return match[0]
        target = Path(os.path.normpath(source.parent / path))
        if str(target) in OUTSIDE:
            inside = Path(OUTSIDE[str(target)])
        elif target.parts[0] == "docs":
            inside = target.relative_to("docs")
        else:
            return f"{shown} (`{target}`)" if shown.strip("`") != str(target) else f"`{target}`"
        return f"{mark}[{shown}]({os.path.relpath(inside, page.parent)}{hash_}{anchor})"

    return LINK.sub(replaced, text)


def commands_page() -> str:
    """The help of every command, as `--help` prints it."""
    with patch.dict(os.environ, COLUMNS="88"):  # argparse takes the width of a page from there
        helps = [
            f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"
            for parser in parsers_below(build_parser())
        ]
    head = "# Commands: all options\n\nWhat `--help` prints, for every [command](../cli.md).\n"
    return "\n".join((head, *helps))


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from parsers_below(child)


class _Page(HTMLParser):
    """What one built page names: its anchors, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") != "canonical":
            self.loads.append(found["href"])
        elif tag in ("a", "area") and "href" in found:
            self.links.append(found["href"])


def problems_of(site: Path) -> list[str]:
    """Links and images that lead nowhere, and everything that a page would load from another host."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    wrong.append(f"{name} loads {link}")
                continue
            if path.name == "404.html":
                continue  # served for any address, so its links are of the site's root
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append(f"{name} links to {link}, which does not exist")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{name} links to {link}, which has no such anchor")
    return wrong


def main() -> int:
    config = project()
    target, site = ROOT / config["docs_dir"], ROOT / config["site_dir"]
    stage(target)
    if missing := unlisted(config["nav"], target):
        print(f"zensical.toml: nav names no entry for {', '.join(missing)}; add them under a heading.")
        return 1
    shutil.rmtree(site, ignore_errors=True)
    built = subprocess.run(
        [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--config-file", str(CONFIG)],
        cwd=ROOT, check=False,
    )  # fmt: skip
    if built.returncode:
        return built.returncode
    wrong = problems_of(site)
    print("\n".join(wrong) or f"{sum(1 for _ in site.rglob('*.html'))} pages in {site}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
