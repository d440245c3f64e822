"""For the site's reference: parameters in a docstring, `name: what it is`, become a list.

In the source they stand without marks, line after line, which Markdown would join into one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

PARAMETER = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


def with_list(text: str) -> str:
    lines: list[str] = []
    is_item = False
    for line in text.splitlines():
        found = PARAMETER.match(line)
        if found:
            if not is_item:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}: {line[found.end() :]}")
            is_item = True
            continue
        is_item = is_item and line.startswith("    ")
        lines.append(line)
    return "\n".join(lines)


class DocstringLists(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = with_list(obj.docstring.value)
