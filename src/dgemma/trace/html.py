"""A trace as one HTML page that needs nothing else: the playground's trace component, and the trace in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib import resources

from dgemma.trace.trace import Trace
from dgemma.trace.trace_writer import to_lines
from dgemma.trace.visible import visible

# What would end an inline script, or begin a comment in it; it only stands in strings.
_ENDS_SCRIPT = re.compile(r"<(?=!--|/?script)", re.IGNORECASE)
_ENDS_STYLE = re.compile(r"</style", re.IGNORECASE)


def to_html(trace: Trace, title: str = "A trace") -> str:
    """The whole page. It has no address in it, and its policy allows only its own script and style."""
    script, style = _component()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # ASCII: a lone surrogate of a broken token is no valid UTF-8. Without < no text can end the element.
    lines = json.dumps(list(to_lines(trace)), separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(visible(title, 200))}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<script type="application/json" id="trace">{lines}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


@cache
def _component() -> tuple[str, str]:
    """Script and style, as the page holds them."""
    folder = resources.files("dgemma") / "data" / "web" / "trace-page"
    script = _ENDS_SCRIPT.sub(r"\\x3C", (folder / "trace.js").read_text(encoding="utf-8"))
    style = (folder / "trace.css").read_text(encoding="utf-8")
    assert not _ENDS_STYLE.search(style)
    return script, style


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
