"""What a model could write to act where its text is shown: markup, escapes, controls, huge tokens."""

from __future__ import annotations

import random

HOSTILE = [
    "<script>alert(1)</script>", "</text></svg><img src=x onerror=alert(1)>", "]]>", "<!--", "&lt;", "&#0;",
    '" onload="x', "\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\x00", "\x7f", "\r\n", "\u202egnp.exe",
    "\u2066\u2067\u2069", "a\u200bb\u200dc", "\ufeff", "\u2028\u2029", "e" + "\u0301" * 500, "\ud800",
    "A" * 100_000, "\U000e0041", "\uffff", "\u115f\u3164", "漢字" * 40, "🏳️‍🌈", "\t\t", "javascript:alert(1)",
    "${7*7}", "{{7*7}}", "%s%n", "\\u001b[2J",
]  # fmt: skip


def hostile_texts(count: int = 200) -> list[str]:
    """Each of them, and random triples."""
    rng = random.Random(0)
    return [*HOSTILE, *("".join(rng.choices(HOSTILE, k=3)) for _ in range(count - len(HOSTILE)))]
