"""The prose of Python's documentation, paragraph by paragraph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from recipes.english.entry import Entry
from recipes.english.prose import kept_sentences
from recipes.text.rst import clean_rst, tidy, titles_of_labels

SOURCE = "python"
USR = Path("/usr")
_PARAGRAPH = re.compile(r"(?:^|\n\n)[ ]*([A-Z][^\n]*(?:\n[ ]*[^\s.:*>-][^\n]*)*)(?=\n\n)")


def python_entries(usr: Path = USR) -> Iterator[Entry]:
    files = sorted(usr.glob("share/doc/python3.[0-9]*/html/_sources/**/*.rst.txt"))
    pages = {file.name: tidy(file.read_text("utf-8")) for file in files if file.name != "changelog.rst.txt"}
    titles = titles_of_labels(pages.values())
    for name, page in pages.items():
        text = clean_rst(page, titles).replace("**", "").replace("*", "")
        for number, paragraph in enumerate(_PARAGRAPH.findall(text)):
            if kept := kept_sentences(paragraph):
                yield Entry(SOURCE, f"{name}.{number}", kept)
