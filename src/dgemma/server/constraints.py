"""Forms as constraints of the served model: compiled in threads of their own, a few at a time.

Compiling is bounded, and a hostile form takes all of the seconds there are: it shall hold up neither the
event loop nor the threads that read other requests. What was compiled before waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from dgemma.constraint.compiler import Compiler
from dgemma.constraint.constraint import Constraint
from dgemma.constraint.forms import Form
from dgemma.errors import InputError
from dgemma.server.api_error import refused, timed_out
from dgemma.server.form_fields import AskedForm

AT_ONCE = 2
# Refusals that are remembered: who asks once more does not wait once more.
_MOST_REFUSALS = 1024


class Constraints:
    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="compile")
        self._refusals: OrderedDict[int, str] = OrderedDict()  # by the hash of what was asked
        self._lock = Lock()

    async def of(self, asked: AskedForm, *, timeout_s: float) -> Constraint:
        """The constraint, or a 400 that names the field."""
        known = self._compiler.known(asked.form, thinks=asked.thinks)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(timeout_s):
                # A client that leaves takes its job back, if that has not begun.
                return await asyncio.wrap_future(self._pool.submit(self._compile, asked.form, asked.thinks))
        except TimeoutError:
            raise timed_out(
                f"{asked.field} was not compiled within {timeout_s:g} seconds: others were before it."
            ) from None
        except InputError as error:
            field = "tools" if str(error).startswith("tool ") else asked.field
            raise refused(f"{field}: {error}", field) from None

    def _compile(self, form: Form, thinks: bool) -> Constraint:
        key = hash((form, thinks))
        with self._lock:
            refusal = self._refusals.get(key)
        if refusal is not None:
            raise InputError(refusal)
        try:
            return self._compiler.compile(form, thinks=thinks)
        except InputError as error:
            with self._lock:
                self._refusals[key] = str(error)
                if len(self._refusals) > _MOST_REFUSALS:
                    self._refusals.popitem(last=False)
            raise
