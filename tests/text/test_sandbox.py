"""A template renders prompts; it reaches nothing else and takes no unbounded time or room."""

from __future__ import annotations

import re
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from dgemma.errors import InputError
from dgemma.text import sandbox as sandbox_module
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.sandbox import TemplateLimitError, TemplateRefusalError, TemplateSandbox
from text.bundled import TOKENIZER

CHAT = [{"role": "user", "content": "hello 1234567 * {}"}]


def run(source: str, **variables: Any) -> str:
    sandbox = TemplateSandbox()
    return sandbox.render_bounded(sandbox.compile_marked(source, str), variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content.__len__() }}",
        "{{ (messages | attr('__class__')).__name__ }}",
    ],
)
def test_pythons_own_attributes_are_out_of_reach(source: str) -> None:
    with pytest.raises(InputError, match=r"cannot render this chat: (Security|Undefined)Error") as caught:
        ChatTemplate(source, TOKENIZER).render(CHAT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [[]] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 99999999999 }}",
        "{{ 99999999999 * 'x' }}",
        "{{ ['x'] * 99999999999 }}",
        "{{ 9 ** 99999999 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' % (99999999999, 1) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 99999999999) }}",
        "{{ 'x'.ljust(99999999999) }}",
        "{{ 'x'.zfill(99999999999) }}",
        "{{ 'x' | center(99999999999) }}",
        "{{ 'x\ny' | indent(width=99999999999) }}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% for i in range(99999999999) %}{% endfor %}",
        "{{ lipsum(99999999) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_work_and_size_are_bounded(source: str) -> None:
    with pytest.raises(InputError, match=r"exceeds a limit|cannot render") as caught:
        ChatTemplate(source, TOKENIZER).render(CHAT)
    assert "\n" not in str(caught.value)


def test_each_bound_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_STEPS", 5000)
    monkeypatch.setattr(sandbox_module, "MAX_OUTPUT_CHARS", 99_999)
    with pytest.raises(TemplateLimitError, match="a size above 10000"):
        run("{{ 'x'.center(10001) }}")
    for wide in ("'%10000d' % 1", "'%*d' % (9, 1)", "'{:10000}'.format(1)", "'{:{}}'.format(1, 9)"):
        with pytest.raises(TemplateLimitError, match="format with a width"):
            run("{{ " + wide + " }}")
    with pytest.raises(TemplateLimitError, match="characters of output"):
        run("{% for i in range(11) %}{{ text }}{% endfor %}", text="x" * 9999)
    with pytest.raises(TemplateLimitError, match="more than 5000 steps"):
        run("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}")
    with pytest.raises(TemplateRefusalError, match="no such chat"):
        run("{{ raise_exception('no such chat') }}")
    with pytest.raises(SecurityError):
        run("{{ ''.__class__.__name__ }}")
    with pytest.raises(UndefinedError):
        run("{{ nothing.at_all }}")


def test_a_template_cannot_reach_the_counter() -> None:
    source = "{% set step = 1 %}{% for k, v in self._TemplateReference__context.parent.items() %}{% endfor %}"
    with pytest.raises(TemplateError):
        run(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'k': '<é>'} | tojson }}", '{"k": "<é>"}'),
        ("{{ ['é'] | tojson(ensure_ascii=true) }}", '["\\u00e9"]'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(6) if i is odd %}{{ i }}{{ ',' if not loop.last }}{% endfor %}", "1,3,5"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ 'ab' * 2 }}{{ 3 * 4 }}{{ 2 ** 5 }}{{ '%02d' % 7 }}{{ '%s' | format('x') }}", "abab123207x"),
        ("{{ 123456789 * 2 }}{{ '{}'.format(1234567) }}", "2469135781234567"),
        ("{{ 'x'.ljust(3) }}|{{ 'x' | center(3) }}|{{ 'a\nb' | indent(2) }}", "x  | x |a\n  b"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ],
)
def test_what_templates_rely_on_works(source: str, expected: str) -> None:
    assert run(source) == expected


def test_the_date_is_available() -> None:
    assert re.fullmatch(r"\d{4}-\d{2}", run("{{ strftime_now('%Y-%m') }}"))
