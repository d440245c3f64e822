"""The sandbox of chat templates: Jinja's sandbox, the helpers templates expect, limits on work and size.

A template is code from a checkpoint. It cannot read Python's own attributes or change its inputs; its loops,
macros, repetitions and output are counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import count
from typing import Any

from jinja2 import Template, TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 500_000  # loop iterations and macro calls
MAX_OUTPUT_CHARS = 32 << 20
_STEPS = "dgemma steps"  # no name that a template could write
_PADDING = ("ljust", "rjust", "center", "zfill", "expandtabs")
_WIDE_FORMAT = re.compile(r"[0-9]{5,}|\*|\{[^}]*\{")


class TemplateRefusalError(TemplateError):
    """The template called `raise_exception`."""


class TemplateLimitError(TemplateError):
    """The template exceeded a limit on work or memory."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    # `'x' * 10 ** 9` is small code with a large result; so are wide formats and paddings.
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock, _StepCounter]
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.filters["tojson"] = _tojson
        self.filters["format"] = _formatted
        for name in ("center", "indent"):
            self.filters[name] = _padded(self.filters[name])

    def compile_marked(self, source: str, mark: Callable[[str], str]) -> Template:
        """The template with `mark` applied to each of its own texts, and with its loops counted."""
        tree = _ControlMarker(mark).visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def render_bounded(self, template: Template, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in template.generate({**variables, _STEPS: count(1)}):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise TemplateLimitError(f"more than {MAX_OUTPUT_CHARS} characters of output")
            parts.append(part)
        return "".join(parts)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        # Jinja would render an empty string; a prompt with missing text is worse than an error.
        raise SecurityError(f"templates may not read {attribute!r} of a {type(obj).__name__}")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ in _PADDING:
            _check_sizes(*args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "**":
            _check_sizes(left, right)
        elif operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                    _check_sizes(len(repeated) * times, limit=MAX_OUTPUT_CHARS)
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what training supervises; for rendering it is only a block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _StepCounter(Extension):
    """Counts loop iterations and macro calls; templates cannot access the counter."""

    @pass_context
    def step(self, context: Context) -> bool:
        if next(context.parent[_STEPS]) > MAX_STEPS:
            raise TemplateLimitError(f"more than {MAX_STEPS} steps")
        return True


class _ControlMarker(NodeTransformer):
    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        node.data = self._mark(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, str):
            node.value = self._mark(node.value)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.test is not None:  # `for x in xs if test`: iterations that fail the test count too
            node.test = nodes.And(_step_call(node), node.test, lineno=node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(_step_call(node), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step_call(node), lineno=node.lineno))
        return node


def _step_call(node: nodes.Node) -> nodes.Call:
    step = nodes.ExtensionAttribute(_StepCounter.identifier, "step", lineno=node.lineno)
    return nodes.Call(step, [], [], None, None, lineno=node.lineno)


def _raise_exception(message: object) -> None:
    raise TemplateRefusalError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models are not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _padded(function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(text: Any, *args: Any, **kwargs: Any) -> Any:
        _check_sizes(*args, *kwargs.values())
        return function(text, *args, **kwargs)

    return checked


def _formatted(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(text)
    return do_format(text, *args, **kwargs)


def _check_sizes(*sizes: object, limit: int = 10_000) -> None:
    for size in sizes:
        if isinstance(size, int) and abs(size) > limit:
            raise TemplateLimitError(f"a size above {limit}")


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("a format with a width above 9999 or a computed one")
