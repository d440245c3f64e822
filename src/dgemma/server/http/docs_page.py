"""GET /docs: the OpenAPI description as one page that needs neither a script nor another host."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgemma.server.http.html_page import escaped, marked_up, whole_page

DOCS_PATH = "/docs"
# Stands for the address of the server in a rendered page. No text of the description has it.
_ADDRESS = "http://address.invalid"
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
# A bound of this size only says that a number is not endless.
_ENDLESS = 1e9
_LIMITS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " entries"),
    ("minProperties", "maxProperties", " entries"),
)

Json = Mapping[str, Any]


def render_docs(schema: Json) -> str:
    """The page of a description; `with_address` makes it that of one server."""
    info = schema["info"]
    operations = [
        (path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    links = "".join(
        f'<li><a href="#{_anchor(method, path)}"><code>{escaped(method.upper())} {escaped(path)}</code></a> '
        f"{marked_up(operation.get('summary', ''))}</li>\n"
        for path, method, operation in operations
    )
    sections = "".join(_Operation(schema, *operation).html() for operation in operations)
    title = f"{info['title']} {info['version']}"
    return whole_page(
        title,
        f"<header>\n<h1>{escaped(title)}</h1>\n"
        '<p>Every endpoint of this server, from its <a href="/openapi.json">OpenAPI description</a>.</p>\n'
        f'</header>\n<nav aria-label="Endpoints">\n<ul>\n{links}<li><a href="#objects">Objects</a></li>\n'
        f"</ul>\n</nav>\n<main>\n{sections}{_objects(schema)}</main>",
    )


def with_address(page: str, scheme: str, host: str) -> str:
    """The page whose examples have this server's address, as the client wrote it in its Host header."""
    known = host if _HOST.fullmatch(host) else "127.0.0.1:8000"
    return page.replace(_ADDRESS, f"{'https' if scheme == 'https' else 'http'}://{known}")


class _Operation:
    """The section of one endpoint."""

    def __init__(self, schema: Json, path: str, method: str, operation: Json) -> None:
        self._schema = schema
        self._path, self._method, self._operation = path, method, operation
        self._body = _json_body(operation)

    def html(self) -> str:
        name = f"{self._method.upper()} {self._path}"
        return (
            f'<section id="{_anchor(self._method, self._path)}">\n<h2><code>{escaped(name)}</code></h2>\n'
            f"<p>{marked_up(self._operation.get('summary', ''))}</p>\n"
            f"{self._parameters()}{self._fields()}"
            f"<h3>Example</h3>\n<pre><code>{escaped(self.command())}</code></pre>\n"
            f"{self._responses()}</section>\n"
        )

    def command(self) -> str:
        """A curl line that is answered."""
        path = self._path
        method = "" if self._method in ("get", "post") else f" -X {self._method.upper()}"
        for parameter in self._operation.get("parameters", ()):
            path = path.replace("{" + parameter["name"] + "}", str(parameter.get("example", "NAME")))
        words = [f"curl{method} {shlex.quote(_ADDRESS + path)}"]
        if self._operation.get("security", self._schema.get("security")):
            words.append('-H "authorization: Bearer $DGEMMA_API_KEY"')
        if self._body is not None:
            example = json.dumps(self._body.get("example", {}), ensure_ascii=False)
            words += ["-H 'content-type: application/json'", f"-d {shlex.quote(example)}"]
        return " \\\n  ".join(words)

    def _parameters(self) -> str:
        found = self._operation.get("parameters", ())
        if not found:
            return ""
        rows = "".join(
            _field(parameter["name"], parameter["schema"], is_required=bool(parameter.get("required")))
            for parameter in found
        )
        return f"<h3>In the address</h3>\n<dl>\n{rows}</dl>\n"

    def _fields(self) -> str:
        kinds = [_name(kind) for kind in _bodies(self._operation)]
        shown = ""
        for number, name in enumerate(kinds):
            kind = self._schema["components"]["schemas"][name]
            head = "Fields" if len(kinds) == 1 else f"Fields, {'or' if number else 'either'} {name}"
            shown += f"<h3>{escaped(head)}</h3>\n{_described(kind)}{_field_list(kind)}"
        return shown

    def _responses(self) -> str:
        rows = ""
        for status, response in self._operation["responses"].items():
            contents = response.get("content", {}).values()
            schemas = [found["schema"] for found in contents if "schema" in found]
            kinds = " | ".join(dict.fromkeys(map(_kind, schemas)))
            rows += (
                f'<dt><code>{escaped(status)}</code> <span class="facts">{kinds}</span></dt>'
                f"<dd>{marked_up(response['description'])}</dd>\n"
            )
        return f"<h3>Responses</h3>\n<dl>\n{rows}</dl>\n"


def _objects(schema: Json) -> str:
    """What fields and responses refer to. The bodies stand at their endpoints."""
    bodies = {
        _name(kind)
        for methods in schema["paths"].values()
        for operation in methods.values()
        for kind in _bodies(operation)
    }
    shown = "".join(
        f'<h3 id="object-{escaped(name)}">{escaped(name)}</h3>\n{_described(kind)}{_field_list(kind)}'
        for name, kind in sorted(schema["components"]["schemas"].items())
        if name not in bodies
    )
    return f'<section id="objects">\n<h2>Objects</h2>\n{shown}</section>\n'


def _json_body(operation: Json) -> Json | None:
    body: Json | None = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return body


def _bodies(operation: Json) -> Sequence[Json]:
    """References to the objects of which a body is one."""
    body = _json_body(operation)
    return () if body is None else body["schema"].get("anyOf", [body["schema"]])


def _described(kind: Json) -> str:
    return f"<p>{marked_up(kind['description'])}</p>\n" if kind.get("description") else ""


def _field_list(kind: Json) -> str:
    if not kind.get("properties"):
        return f'<p class="facts">{_kind(kind)}</p>\n'
    required = kind.get("required", ())
    # Stable: required fields first, each group in the order of the description.
    fields = sorted(kind["properties"].items(), key=lambda entry: entry[0] not in required)
    rows = "".join(_field(name, field, is_required=name in required) for name, field in fields)
    return f"<dl>\n{rows}</dl>\n"


def _field(name: str, field: Json, *, is_required: bool) -> str:
    facts = [_kind(field, may_omit_null=not is_required), "required" if is_required else "optional"]
    # A default of null is the absent field.
    if not is_required and field.get("default") is not None:
        facts.append(f"default: <code>{escaped(json.dumps(field['default'], ensure_ascii=False))}</code>")
    return (
        f'<dt><code>{escaped(name)}</code> <span class="facts">{" · ".join(facts)}</span></dt>'
        f"<dd>{marked_up(field.get('description', ''))}</dd>\n"
    )


def _kind(schema: Json, *, may_omit_null: bool = False) -> str:
    """The type of a value in one line, as HTML."""
    if "$ref" in schema:
        name = escaped(_name(schema))
        return f'<a href="#object-{name}">{name}</a>'
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        shown = [value for value in values if not (may_omit_null and value is None and len(values) > 1)]
        return " | ".join(f"<code>{escaped(json.dumps(value, ensure_ascii=False))}</code>" for value in shown)
    ways = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if ways:
        kept = [way for way in ways if not (may_omit_null and way.get("type") == "null")] or ways
        return " | ".join(dict.fromkeys(_kind(way) for way in kept))
    named = schema.get("type", "any value")
    kind = escaped(" | ".join(named) if isinstance(named, list) else named)
    if named == "array":
        kind = f"list of {_grouped(_kind(schema['items']))}" if schema.get("items") else "list"
    elif named == "object" and schema.get("properties"):
        kind = f"object of {', '.join(f'<code>{escaped(name)}</code>' for name in schema['properties'])}"
    elif named == "object" and isinstance(schema.get("additionalProperties"), dict):
        kind = f"object of {_grouped(_kind(schema['additionalProperties']))}"
    limits = ", ".join(_limits(schema))
    return f"{kind} ({escaped(limits)})" if limits else kind


def _grouped(kind: str) -> str:
    return f"({kind})" if " | " in kind else kind


def _limits(schema: Json) -> Iterator[str]:
    if "exclusiveMinimum" in schema:
        yield f"above {_shown(schema['exclusiveMinimum'])}"
    for low_name, high_name, unit in _LIMITS:
        low, high = (schema.get(name) for name in (low_name, high_name))
        low, high = (None if _is_endless(limit) else limit for limit in (low, high))
        if low is not None and high is not None:
            yield f"{_shown(low)} to {_shown(high)}{unit}"
        elif high is not None:
            yield f"at most {_shown(high)}{unit}"
        elif low == 1 and unit:
            yield "not empty"
        elif low is not None:
            yield f"at least {_shown(low)}{unit}"


def _is_endless(limit: object) -> bool:
    return isinstance(limit, int | float) and abs(limit) >= _ENDLESS


def _shown(limit: object) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _name(reference: Json) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _anchor(method: str, path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{method} {path}".lower()).strip("-")
