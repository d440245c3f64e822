"""The process that compiles and renders chat templates, within limits on memory and processor time.

Counting inside the sandbox cannot bound all that Jinja and Python compute: `s ~ s` in a loop, `replace`,
`join`, products of large integers, constants that are folded when a template is compiled. The operating
system can. `template_process.py` starts this process and asks it.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Template, meta

from dgemma.text.sandbox import TemplateLimitError, TemplateRefusalError, TemplateSandbox
from dgemma.text.template_protocol import FIRST_MARK, MAX_CPU_SECONDS, ReplyKind, encode
from dgemma.worker_process import limits, read_message, say_ready, write_message

MAX_MEMORY_BYTES = 192 << 20  # more than before the request, and for each byte of it eight more
_MAX_ERROR_CHARS = 4096

Compiled = tuple[Template, tuple[str, ...], list[str]]


def main() -> None:
    """Answer requests until the caller closes the pipe, which it does at the latest by ending."""
    say_ready()
    while (request := read_message(sys.stdin.buffer)) is not None:
        with limits(MAX_MEMORY_BYTES + 8 * len(request), MAX_CPU_SECONDS):
            reply = _reply(request)
        write_message(sys.stdout.buffer, reply)


def _reply(request: bytes) -> bytes:
    try:
        try:
            text = _text(*pickle.loads(request))  # noqa: S301, the caller is our own package
            return ReplyKind.DONE.value + encode(text)
        except TemplateRefusalError as error:
            return _error_reply(ReplyKind.REFUSED, str(error))
        except TemplateLimitError as error:
            return _error_reply(ReplyKind.LIMIT, str(error))
        except MemoryError:
            raise
        except Exception as error:  # a template can make Python raise anything
            if _is_from_memory(error):
                raise MemoryError from error
            return _error_reply(ReplyKind.FAILED, f"{type(error).__name__}: {error}")
    except MemoryError:  # also while an error is described
        return _error_reply(ReplyKind.LIMIT, f"more than {MAX_MEMORY_BYTES >> 20} MiB of memory")


def _is_from_memory(error: BaseException | None) -> bool:
    """Whether the error came up while one for want of memory was handled, or Python could not say which."""
    while error is not None:
        if isinstance(error, (MemoryError, SystemError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _error_reply(kind: ReplyKind, text: str) -> bytes:
    return kind.value + encode(text[:_MAX_ERROR_CHARS])


def _text(source: str, names: tuple[str, ...], variables: Mapping[str, Any] | None) -> str:
    """The rendered text; without variables, what the caller needs to know of the template, as JSON."""
    template, used, known = _compiled(source, names)
    if variables is None:
        return json.dumps({"used": used, "known": known})
    return _sandbox().render_bounded(template, variables)


@lru_cache(maxsize=4)
def _compiled(source: str, names: tuple[str, ...]) -> Compiled:
    """The template, the control names it uses and the variables it reads.

    Each control is replaced by a mark, in the order of their first use: with `used` as names, the marks are
    the same.
    """
    # The longest name matches first, as in the tokenizer.
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
    marks: dict[str, str] = {}

    def mark(text: str) -> str:
        return pattern.sub(lambda match: marks.setdefault(match[0], chr(FIRST_MARK + len(marks))), text)

    template = _sandbox().compile_marked(source, mark)
    known = meta.find_undeclared_variables(_sandbox().parse(source))
    return template, tuple(marks), sorted(known)


@lru_cache(maxsize=1)
def _sandbox() -> TemplateSandbox:
    return TemplateSandbox()
