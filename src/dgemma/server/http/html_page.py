"""HTML pages of the server: one style, no scripts, nothing from other hosts, and a policy that says so."""

from __future__ import annotations

import base64
import hashlib
import html
import re

from starlette.responses import Response

# Colours have a contrast of at least 4.5 to 1. Long names break, so that 400 pixels are enough.
_STYLE = """\
:root{color-scheme:light dark;
--text:#1c1c22;--back:#fff;--soft:#5b5b68;--link:#0b57d0;--line:#d5d5de;--code:#f3f3f7}
@media (prefers-color-scheme:dark){
:root{--text:#e7e7ec;--back:#16161a;--soft:#a9a9b8;--link:#8ab4f8;--line:#3a3a44;--code:#222229}}
body{margin:0;background:var(--back);color:var(--text);font:1rem/1.5 system-ui,sans-serif}
header,main,nav{max-width:56rem;margin:0 auto;padding:.5rem 1rem;overflow-wrap:anywhere}
section{border-top:1px solid var(--line);margin-top:1.5rem}
h1{font-size:1.6rem}h2{font-size:1.2rem}h3{font-size:1rem;margin-bottom:.25rem}
a{color:var(--link)}
code,pre{font-family:ui-monospace,monospace;font-size:.9em;background:var(--code);border-radius:.25rem}
code{padding:0 .2em}
pre{padding:.6rem;white-space:pre-wrap}pre code{padding:0;font-size:1em}
dl{margin:.25rem 0}dt{margin-top:.5rem}dd{margin:0 0 0 1rem;color:var(--soft)}
ul{padding-left:1.2rem}
.facts{color:var(--soft);font-size:.9em}
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_CODE = re.compile(r"`([^`]+)`")


def escaped(text: object) -> str:
    return html.escape(str(text), quote=True)


def marked_up(text: object) -> str:
    """Escaped, with `code` between backticks."""
    return _CODE.sub(r"<code>\1</code>", escaped(text))


def whole_page(title: str, content: str) -> str:
    """`content`: HTML whose texts are escaped."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{content}\n</body>\n</html>\n"
    )


def html_response(page: str, **headers: str) -> Response:
    return Response(page, media_type="text/html", headers={**HEADERS, **headers})
