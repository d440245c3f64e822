"""A trace as a page: one file, nothing from elsewhere, and no text of the trace acts in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from dgemma.trace.html import to_html
from dgemma.trace.trace import Trace
from dgemma.trace.trace_reader import trace_of_bytes
from hostile_texts import hostile_texts


def trace_of(*texts: str) -> Trace:
    tokens = list(range(10, 10 + len(texts)))
    lines = [
        {"format": "dgemma-trace", "version": 1, "about": {"command": texts[0]}},
        {"texts": {str(token): text for token, text in zip(tokens, texts, strict=True)}},
        {"request": {"number": 0, "round": 0, "row": 0, "seed": 1, "prompt": [], "params": {}}},
        {
            "step": {
                "request": 0, "canvas": 0, "step": 1, "at_ms": 1.0, "argmax": tokens,
                "entropy": [5] * len(tokens), "accepted": "1",
            }
        },
        {"commit": {"request": 0, "canvas": 0, "tokens": tokens, "steps": 1}},
        {"end": {"lines": 5}},
    ]  # fmt: skip
    return trace_of_bytes("\n".join(map(json.dumps, lines)).encode())


def test_the_page_loads_nothing_and_its_policy_names_its_own_script_and_style() -> None:
    page = to_html(trace_of("a", "b"))
    (policy,) = re.findall(r'content-security-policy" content="([^"]+)"', page)
    policy = policy.replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for content in (script, style):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", page)


def test_text_of_the_trace_cannot_leave_its_element() -> None:
    hostile = hostile_texts()
    assert len(hostile) == 200
    page = to_html(trace_of(*hostile), title="</title><script>x")
    page.encode("utf-8")  # no lone surrogate is left
    assert len(re.findall(r"</script", page)) == 2
    assert len(re.findall(r"<script", page)) == 2
    assert "<!--" not in page
    (held,) = re.findall(r'id="trace">(.*?)</script>', page, re.DOTALL)
    texts = [line["texts"] for line in json.loads(held) if "texts" in line]
    # A longer text of one token is cut when it is read.
    written = {text for some in texts for text in some.values()}
    assert [text[:40] for text in hostile if text[:4096] not in written] == []
    assert "&lt;/title&gt;" in page
