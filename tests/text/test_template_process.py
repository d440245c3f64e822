"""A template's memory and processor time end in an error, and the worker that renders it comes back."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dgemma import worker_process
from dgemma.errors import CheckpointError, DgemmaError, InputError
from dgemma.text import template_process, template_worker
from dgemma.text.chat_template import ChatTemplate
from dgemma.text.template_process import TEMPLATES, TemplateProcess
from dgemma.text.template_protocol import ReplyKind
from text.bundled import TOKENIZER

READY = "from dgemma.worker_process import say_ready; say_ready()"
HELLO = "{{ greeting }} {{ '<|turn>' }}"
# Each passes the sandbox's own counts.
ATTACKS = {
    "concatenation": "{% set n = namespace(s='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}",
    "addition": "{% set n = namespace(s='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
    "lists": "{% set n = namespace(s=[1, 2, 3, 4]) %}"
    "{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
    "nested lists": "{% set n = namespace(s=[]) %}"
    "{% for i in range(99999) %}{% set n.s = [n.s, range(9999) | list] %}{% endfor %}{{ n.s | length }}",
    "replace": "{% set n = namespace(s='xx') %}"
    "{% for i in range(60) %}{% set n.s = n.s | replace('x', 'xxxx') %}{% endfor %}{{ n.s | length }}",
    "join": "{% set n = namespace(s='xxxxxxxx') %}"
    "{% for i in range(60) %}{% set n.s = [n.s, n.s] | join(n.s) %}{% endfor %}{{ n.s | length }}",
    "batch": "{% for row in [1] | batch(999999999, 'x') %}{{ row | length }}{% endfor %}",
    "products": "{% set n = namespace(x=999) %}"
    "{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}",
    "sums": "{% set n = namespace(x=0) %}"
    "{% for i in range(9999) %}{% set n.x = range(99999) | sum %}{% endfor %}{{ n.x }}",
}
FOLDED = "{{ 'xx'" + " | replace('x', 'xxxxxxxx')" * 20 + " }}"  # computed when the template is compiled
# Measured in a process of its own: the largest child of this one may be another test's.
MEASURE = """
import json, resource, sys
from dgemma.text.template_process import TEMPLATES
TEMPLATES.max_seconds = 600
reply = TEMPLATES.ask(sys.argv[1], (), json.loads(sys.argv[2]))
TEMPLATES.end()
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([reply.kind.name, reply.text, used.ru_utime + used.ru_stime, used.ru_maxrss]))
"""


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, it is the worker's own limits that end an attack."""
    monkeypatch.setattr(template_process, "MAX_SECONDS", 600.0)
    monkeypatch.setattr(TEMPLATES, "max_seconds", 600.0)


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess()
    yield made
    made.end()


def rendered(process: TemplateProcess, **variables: Any) -> str:
    reply = process.ask(HELLO, ("<|turn>",), variables)
    assert reply.kind is ReplyKind.DONE
    return reply.text


def pid_of(process: TemplateProcess) -> int:
    assert process._process is not None
    return process._process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits memory")
@pytest.mark.parametrize(
    ("source", "variables"),
    [*((source, {}) for source in ATTACKS.values()), (FOLDED, None)],
    ids=[*ATTACKS, "folded when compiled"],
)
def test_an_attack_ends_within_the_limits_on_time_and_memory(source: str, variables: Any) -> None:
    command = [sys.executable, "-c", MEASURE, source, json.dumps(variables)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kind, text, cpu_s, max_kib = json.loads(output)
    assert kind == "LIMIT"
    assert "seconds of processor time" in text or "MiB of memory" in text
    assert cpu_s < 4  # with the start of the worker
    assert max_kib < 300 << 10


def test_a_limit_is_an_error_of_the_chat_and_when_compiled_one_of_the_checkpoint() -> None:
    template = ChatTemplate(ATTACKS["products"], TOKENIZER)
    with pytest.raises(InputError, match="exceeds a limit on this chat: more than"):
        template.render([{"role": "user", "content": "hello"}])
    with pytest.raises(CheckpointError, match="the chat template exceeds a limit: more than"):
        ChatTemplate(FOLDED, TOKENIZER)


def test_a_large_chat_is_no_attack(process: TemplateProcess) -> None:
    """The longest text that is accepted, of characters that take the most memory."""
    text = "\U0001f600" * (4 << 20)
    assert rendered(process, greeting=text) == f"{text} \ud800"


def test_rendering_goes_on_after_an_attack(process: TemplateProcess) -> None:
    before = rendered(process, greeting="hello")
    assert process.ask(ATTACKS["products"], (), {}).kind is ReplyKind.LIMIT
    assert rendered(process, greeting="hello") == before == "hello \ud800"


def test_a_worker_that_was_killed_is_started_again(process: TemplateProcess) -> None:
    rendered(process, greeting="hello")
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert rendered(process, greeting="hello") == "hello \ud800"


def test_a_worker_that_never_answers_is_killed(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "max_seconds", 0.2)
    stuck = [sys.executable, "-c", f"{READY}; import time; time.sleep(600)"]
    monkeypatch.setattr(
        process,
        "_start",
        lambda: subprocess.Popen(stuck, stdin=subprocess.PIPE, stdout=subprocess.PIPE),
    )
    reply = process.ask(HELLO, (), {})
    assert reply.kind is ReplyKind.LIMIT
    assert "its process ended with code -9" in reply.text


def test_the_time_to_start_is_not_that_of_a_reply(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be so busy that a worker needs longer to start than any template may take."""
    monkeypatch.setattr(process, "max_seconds", 0.0)
    began: list[float] = []
    killed_after = worker_process._killed_after

    def noted(seconds: float, process: subprocess.Popen[bytes]) -> Any:
        began.append(seconds)
        return killed_after(seconds or 60, process)

    monkeypatch.setattr(worker_process, "_killed_after", noted)
    assert rendered(process, greeting="hello") == "hello \ud800"
    assert began == [worker_process.START_SECONDS, 0.0]


def test_a_worker_that_does_not_start_is_killed(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "START_SECONDS", 0.2)
    stuck = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(
        process,
        "_start",
        lambda: subprocess.Popen(stuck, stdin=subprocess.PIPE, stdout=subprocess.PIPE),
    )
    reply = process.ask(HELLO, (), {})
    assert reply.kind is ReplyKind.LIMIT
    assert process._process is None


def test_an_interrupted_caller_leaves_no_reply_for_the_next(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered(process, greeting="hello")
    sent = process._send

    def interrupted(*args: Any) -> bytes:
        sent(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_send", interrupted)
    first = pid_of(process)
    with pytest.raises(KeyboardInterrupt):
        process.ask(HELLO, (), {"greeting": "secret"})
    monkeypatch.setattr(process, "_send", sent)
    assert rendered(process, greeting="hello") == "hello \ud800"
    assert pid_of(process) != first


def test_threads_get_their_own_replies(process: TemplateProcess) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: rendered(process, greeting=str(i) * 1000), range(200)))
    assert found == [f"{str(i) * 1000} \ud800" for i in range(200)]


def test_adjacent_marks_stay_two(process: TemplateProcess) -> None:
    """A high and a low surrogate are not joined to one character."""
    assert process.ask(r"{{ '\ud83d' ~ '\ude00' }}", (), {}).text == "\ud83d\ude00"


def test_the_worker_imports_no_torch(process: TemplateProcess) -> None:
    rendered(process, greeting="hello")
    with open(f"/proc/{pid_of(process)}/maps") as maps:
        assert "torch" not in maps.read()


def has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, None], ids=["killed", "at exit"])
def test_the_worker_ends_with_its_parent(end: signal.Signals | None) -> None:
    code = (
        "from dgemma.text.template_process import TEMPLATES\n"
        "TEMPLATES.ask('x', (), {}); print(TEMPLATES._process.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert not has_ended(worker)
        if end is None:
            parent.communicate("\n")
            assert parent.returncode == 0
        else:
            parent.send_signal(end)
            parent.wait()
        deadline = time.monotonic() + 60
        while not has_ended(worker):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_starts_its_own_worker() -> None:
    """While a thread of the parent holds the lock, as a server's may."""
    code = (
        "import os, sys; from dgemma.text.template_process import TEMPLATES as t\n"
        "t.ask('x', (), {}); mine = t._process.pid\n"
        "with t._lock:\n"
        "    child = os.fork()\n"
        "if child == 0:\n"
        "    good = t.ask('{{ y }}', (), {'y': 'z'}).text == 'z' and t._process.pid != mine\n"
        "    t.end(); os._exit(0 if good else 1)\n"
        "code = os.waitpid(child, 0)[1]\n"
        "sys.exit(code or t.ask('{{ y }}', (), {'y': 'z'}).text != 'z' or t._process.pid != mine)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_a_python_that_cannot_start_processes_is_named(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DgemmaError, match="cannot be started with '/nowhere/python': No such file"):
        process.ask(HELLO, (), {})


def test_no_timer_is_left(process: TemplateProcess) -> None:
    """A cancelled one may still be ending, but can do nothing any more."""
    for _ in range(20):
        rendered(process, greeting="hello")
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


@pytest.mark.parametrize("wrong", [MemoryError, SystemError])
def test_an_error_on_the_way_from_a_want_of_memory_is_that_limit(
    wrong: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """jinja2 looks for the template's line while it handles an error, and that may fail in its own way."""

    def fails(*_: object) -> str:
        try:
            raise wrong
        except wrong:
            raise ValueError("while it was handled") from None

    monkeypatch.setattr(template_worker, "_text", fails)
    reply = template_worker._reply(pickle.dumps(("", (), None)))
    assert reply.startswith(ReplyKind.LIMIT.value)
    monkeypatch.setattr(template_worker, "_text", lambda *_: 1 / 0)
    assert template_worker._reply(pickle.dumps(("", (), None))).startswith(ReplyKind.FAILED.value)
