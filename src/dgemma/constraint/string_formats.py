"""Formats of strings, each as a pattern whose texts everybody takes for it: part of what is allowed."""

from __future__ import annotations

from functools import cache

from dgemma.constraint.pattern import Node, parse

_YEAR = "[12][0-9]{3}"
_LEAP_YEAR = "([12][0-9](0[48]|[2468][048]|[13579][26])|(12|16|20|24|28)00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_N = "[0-9]{1,4}"
_DAYS = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_HOURS = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = "(0|[1-9a-f][0-9a-f]{0,3})"
_IPV6 = "|".join(
    [f"{_GROUP}(:{_GROUP}){{7}}"]
    + [
        (f"{_GROUP}(:{_GROUP}){{{left - 1}}}" if left else "")
        + "::"
        + f"({_GROUP}(:{_GROUP}){{0,{6 - left}}})?"
        for left in range(7)
    ]
)
_LABEL = "[a-z0-9]{1,15}(-[a-z0-9]{1,15}){0,2}"
_LAST_LABEL = "[a-z]{2,15}"
_HOST = rf"({_LABEL}\.){{0,3}}{_LAST_LABEL}"
_NAME = "[A-Za-z0-9_+-]{1,20}"
_PATH = "(/([A-Za-z0-9._~-]|%[0-9A-F]{2})*)*"
_QUERY = r"(\?([A-Za-z0-9._~=&+-]|%[0-9A-F]{2})*)?(#[A-Za-z0-9._~-]*)?"
_URI = rf"(https?|ftp)://{_HOST}(:[1-9][0-9]{{0,3}})?{_PATH}{_QUERY}"
_POINTER = "(/([A-Za-z0-9_ .-]|~[01])*)*"
_VARIABLE = r"\{[+#./;?&]?[a-z][a-z0-9_]{0,15}(,[a-z][a-z0-9_]{0,15}){0,3}\}"
_PATTERNS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_N}W)",
    "email": rf"{_NAME}(\.{_NAME}){{0,2}}@({_LABEL}\.){{1,3}}{_LAST_LABEL}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"([0-9]|[1-9]{{2}})(#|{_POINTER})",
    "time": _TIME,
    "uri": _URI,
    "uri-reference": rf"{_URI}|{_PATH}{_QUERY}",
    "uri-template": rf"(https?://{_HOST})?(/([A-Za-z0-9._~-]|{_VARIABLE})*)*",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_SAME = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "iri-reference": "uri-reference"}
FORMATS = frozenset(_PATTERNS) | frozenset(_SAME)
# Formats of OpenAPI that say nothing about which strings are valid.
WITHOUT_MEANING = frozenset({"binary", "double", "float", "int32", "int64", "password"})


@cache
def format_pattern(name: str) -> Node:
    return parse(_PATTERNS[_SAME.get(name, name)])
