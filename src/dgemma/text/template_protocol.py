"""What `template_process.py` and `template_worker.py` agree on.

A request is a pickled tuple: source, control names, variables. A reply
is one byte, its kind, and text as UTF-8; it is no pickle, because a template had a part in it.
"""

from __future__ import annotations

import enum

MAX_CPU_SECONDS = 2.0
FIRST_MARK = 0xD800  # the first control that a template uses becomes this code point, the second the next


class ReplyKind(enum.Enum):
    DONE = b"d"
    REFUSED = b"r"  # the template called `raise_exception`
    LIMIT = b"l"  # too much work, time or memory
    FAILED = b"f"  # any other error


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # marks are lone surrogates


def decode(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")
