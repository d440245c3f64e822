"""A batch answers each request exactly once, as HTTP would, however often it is cut off on the way."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import tempfile
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.engine.request import EngineRequest
from dgemma.engine.service import EngineDeadError, EngineFailureError, EngineRestartedError
from dgemma.errors import InputError
from dgemma.server.batch.protocol import BatchRequests, BatchResult, BatchResults
from dgemma.server.batch.serving import answer_all, queue_len
from dgemma.server.http.settings import Settings
from dgemma.server.state import ServerState
from server.canvas_bodies import DECIDE, DECIDE_BY_NAME, DECISIONS, EDIT, EDIT_ASKED, FIM, GAP
from server.fake_engine import FakeEngine, FakeText, Script, by_seed
from server.served import CHAT, COMPLETIONS, HELLO, ONCE, WEATHER, app_of, ask, run, run_unhurried
from sizes import cases

Tell = Callable[[BatchResult], None]


def line_of(custom_id: str, body: Any = None, url: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or ONCE, **more}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_batch(
    input_: Path,
    output: Path,
    engine: FakeEngine | None = None,
    tell: Tell | None = None,
    *,
    by: Callable[[Coroutine[Any, Any, None]], None] = run,
    **options: Any,
) -> FakeEngine:
    """What `dgemma run-batch` does, with a fake engine -> that engine."""
    engine = engine or FakeEngine()
    state = ServerState(settings=Settings(**options), engine=engine, text=FakeText())
    requests = BatchRequests(input_, max_line_bytes=state.settings.max_body_bytes)
    with BatchResults(output, requests.ids) as results:

        def add(result: BatchResult) -> None:
            results.add(result)
            if tell is not None:
                tell(result)

        async def answered() -> None:
            try:
                await answer_all(state, requests.without(results.held), add)
            finally:
                assert engine.running == 0, "before the event loop ends, which closes all"

        by(answered())
    return engine


def results_of(output: Path) -> dict[str, Any]:
    """The response to each custom_id, which must stand there exactly once, in OpenAI's form."""
    found: dict[str, Any] = {}
    raw = output.read_bytes()
    assert raw.endswith(b"\n")
    for line in map(json.loads, raw.split(b"\n")[:-1]):
        assert list(line) == ["id", "custom_id", "response", "error"]
        assert list(line["response"]) == ["status_code", "request_id", "body"]
        assert line["id"].startswith("batch_req_")
        assert line["error"] is None
        assert line["custom_id"] not in found
        found[line["custom_id"]] = line["response"]
    return found


def without_chance(body: Any) -> Any:
    """A reply without what differs from one time to the next."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, HELLO),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2, "n": 2, "stop": None}),
        (CHAT, {**HELLO, "model": "sums"}),
        (CHAT, {"model": "dgemma", "messages": HELLO["messages"], "extra_body": {"seed": 3}}),
        (COMPLETIONS, {**ONCE, "prompt": ["a", "b"], "logprobs": 1, "max_tokens": 20}),
        (COMPLETIONS, {**ONCE, "prompt": [1, 2, 3]}),
        (CHAT, {**HELLO, "temprature": 1}),
        (CHAT, {**HELLO, "response_format": {"type": "json_object"}}),
        (CHAT, {**HELLO, "tools": [WEATHER], "tool_choice": "required"}),
        (COMPLETIONS, {**ONCE, "regex": "[0-9]{3}"}),
        (COMPLETIONS, {**ONCE, "regex": "[0-9"}),
        (CHAT, {**HELLO, "model": "gpt"}),
        (CHAT, {**HELLO, "messages": [{"role": "user", "content": "half a \ud83d"}]}),
        (COMPLETIONS, {**ONCE, "prompt": "x" * 5000}),
        (
            COMPLETIONS,
            {**ONCE, "user": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]},
        ),
        (COMPLETIONS, {}),
        (COMPLETIONS, {**ONCE, "stream": "yes"}),
        (COMPLETIONS, {**ONCE, "diffusing": True}),
        (COMPLETIONS, {**GAP, "n": 2}),
        (FIM, GAP),
        (EDIT, {**EDIT_ASKED, "seed": 7}),
        (DECISIONS, DECIDE),
        (DECISIONS, {**DECIDE_BY_NAME, "state": 3}),
    ],
)
def test_a_body_means_what_it_means_over_http(url: str, body: dict[str, Any], tmp_path: Path) -> None:
    line = {**line_of("a", url=url), "body": body}
    input_, output = write_lines(tmp_path / "in", [line]), tmp_path / "out"
    run_batch(input_, output, FakeEngine(adapters=("sums",)))
    found = results_of(output)["a"]
    raw = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    there = ask(app_of(FakeEngine(adapters=("sums",))), "POST", url, content=raw, headers=headers)
    assert found["status_code"] == there.status_code
    assert without_chance(found["body"]) == without_chance(there.json())


@pytest.mark.parametrize("body", [{**ONCE, "stream": True}, {**ONCE, "extra_body": {"stream": True}}])
def test_a_stream_is_refused_for_that_line_alone(body: dict[str, Any], tmp_path: Path) -> None:
    lines = [line_of("streams", body), line_of("whole")]
    engine = run_batch(write_lines(tmp_path / "in", lines), tmp_path / "out")
    found = results_of(tmp_path / "out")
    assert found["streams"]["status_code"] == 400
    assert found["streams"]["body"]["error"]["param"] == "stream"
    assert found["whole"]["status_code"] == 200
    assert len(engine.requests) == 1


any_text = st.text(st.characters(exclude_categories=()), min_size=1, max_size=8)
batches = st.lists(
    st.tuples(
        st.sampled_from([CHAT, COMPLETIONS]),
        st.integers(0, 50),
        st.sampled_from([{}, {"n": 2}, {"temprature": 1}, {"max_tokens": 5}]),
    ),
    min_size=1,
    max_size=6,
).flatmap(
    lambda asked: st.lists(any_text, min_size=len(asked), max_size=len(asked), unique=True).map(
        lambda ids: [
            line_of(id_, {**(HELLO if url == CHAT else ONCE), "seed": seed, **more}, url)
            for id_, (url, seed, more) in zip(ids, asked, strict=True)
        ]
    )
)


@given(lines=batches, escaped=st.booleans(), cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
@settings(max_examples=cases(60, 25), deadline=None)
def test_cut_off_at_any_byte_and_resumed_gives_each_result_exactly_once(
    lines: list[dict[str, Any]], escaped: bool, cuts: list[float]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        input_, once, output = (Path(directory, name) for name in ("in", "once", "out"))
        texts = [json.dumps(line, ensure_ascii=escaped) for line in lines]
        # A surrogate has no UTF-8; its escape is what a file can hold of it.
        input_.write_bytes("\n".join(texts).encode("utf-8", "backslashreplace"))
        run_batch(input_, once, max_num_seqs=2)
        asked = {line["custom_id"]: line["body"]["seed"] for line in lines}
        whole = results_of(once)
        assert whole.keys() == asked.keys()
        output.write_bytes(once.read_bytes())
        for cut in cuts:
            kept = output.read_bytes()[: round(cut * output.stat().st_size)]
            output.write_bytes(kept)
            engine = run_batch(input_, output, max_num_seqs=2)
            whole_lines = kept[: kept.rfind(b"\n") + 1]
            assert output.read_bytes().startswith(whole_lines), "what was written stays as it is"
            found = results_of(output)
            held = {json.loads(line)["custom_id"] for line in whole_lines.splitlines()}
            seeds = [asked[id_] for id_ in asked.keys() - held if found[id_]["status_code"] == 200]
            assert len(engine.requests) >= len(seeds), "a torn result is asked for again"
            assert {request.seed for request in engine.requests} <= {s + i for s in seeds for i in (0, 1)}
            assert found.keys() == whole.keys()
            for custom_id, response in found.items():
                assert response["status_code"] == whole[custom_id]["status_code"]
                assert without_chance(response["body"]) == without_chance(whole[custom_id]["body"])


class Counting(FakeEngine):
    """Knows how many answers were being written at the most."""

    most = 0

    async def _events(self, request: EngineRequest) -> Any:
        events = super()._events(request)
        try:
            async for event in events:
                self.most = max(self.most, self.running)
                yield event
        finally:
            await events.aclose()


def test_at_most_twice_as_many_are_in_flight_as_are_written_at_once(tmp_path: Path) -> None:
    input_ = write_lines(tmp_path / "in", [line_of(str(number)) for number in range(20)])
    engine = Counting(Script(text="x" * 40, turns=5))
    run_batch(input_, tmp_path / "out", engine, max_num_seqs=3)
    assert engine.most == 6
    assert len(results_of(tmp_path / "out")) == 20


def test_all_that_is_in_flight_has_room_in_the_queue() -> None:
    settings = Settings(max_num_seqs=3, max_choices=5)
    assert queue_len(settings) >= 6 * 5


def test_a_result_is_in_the_file_when_it_is_there_whatever_came_before_it(tmp_path: Path) -> None:
    first_may_end = asyncio.Event()

    class FirstIsLast(FakeEngine):
        async def _events(self, request: EngineRequest) -> Any:
            if request.seed == 0:
                await first_may_end.wait()
            async for event in super()._events(request):
                yield event

    lines = [line_of(str(seed), {**ONCE, "seed": seed}) for seed in range(4)]
    seen: list[tuple[str, int]] = []

    def tell(result: BatchResult) -> None:
        seen.append((result.custom_id, len(results_of(tmp_path / "out"))))
        if len(seen) == 3:
            first_may_end.set()

    run_batch(write_lines(tmp_path / "in", lines), tmp_path / "out", FirstIsLast(), tell, max_num_seqs=1)
    assert seen == [("1", 1), ("2", 2), ("3", 3), ("0", 4)]


def test_a_failure_is_the_result_of_its_request_alone(tmp_path: Path) -> None:
    errors = {0: EngineFailureError("a step failed"), 1: ZeroDivisionError("ours")}

    def script(request: EngineRequest) -> Script:
        error = errors.get(request.seed)
        return by_seed(request) if error is None else Script(text="x", fails_at=0, error=error)

    lines = [line_of(str(seed), {**ONCE, "seed": seed}) for seed in range(3)]
    reasons: dict[str, str | None] = {}
    run_batch(
        write_lines(tmp_path / "in", lines),
        tmp_path / "out",
        FakeEngine(script),
        lambda result: reasons.update({result.custom_id: result.reason}),
    )
    found = results_of(tmp_path / "out")
    assert {id_: one["status_code"] for id_, one in found.items()} == {"0": 500, "1": 500, "2": 200}
    assert found["0"]["body"]["error"]["code"] == "engine_failure"
    # Whoever runs a batch may know all there is of an error of ours.
    assert reasons == {"0": "EngineFailureError: a step failed", "1": "ZeroDivisionError: ours", "2": None}


def test_an_engine_that_does_not_end_in_time_is_a_result_too(tmp_path: Path) -> None:
    input_ = write_lines(tmp_path / "in", [line_of("a")])
    engine = FakeEngine(Script(accepts=False))
    limits: dict[str, Any] = {"request_timeout_s": 0.01, "timeout_grace_s": 0.01}
    run_batch(input_, tmp_path / "out", engine, by=run_unhurried, **limits)
    assert results_of(tmp_path / "out")["a"]["status_code"] == 504


def test_a_request_whose_engine_was_restarted_is_asked_once_more(tmp_path: Path) -> None:
    tries: list[int] = []

    def script(request: EngineRequest) -> Script:
        tries.append(request.seed)
        is_unlucky = request.seed == 2 or (request.seed == 1 and tries.count(1) == 1)
        error = EngineRestartedError("a step hung")
        return Script(text="x", fails_at=0, error=error) if is_unlucky else by_seed(request)

    lines = [line_of(str(seed), {**ONCE, "seed": seed}) for seed in range(3)]
    run_batch(write_lines(tmp_path / "in", lines), tmp_path / "out", FakeEngine(script))
    found = results_of(tmp_path / "out")
    assert {id_: one["status_code"] for id_, one in found.items()} == {"0": 200, "1": 200, "2": 503}
    assert sorted(tries) == [0, 1, 1, 2, 2]


def test_an_engine_that_works_no_more_ends_the_batch_and_costs_no_request(tmp_path: Path) -> None:
    def script(request: EngineRequest) -> Script:
        if request.seed == 2:
            engine.failure = "the device is gone"
        return Script(text="x", fails_at=0) if request.seed >= 2 else by_seed(request)

    engine = FakeEngine(script)
    input_ = write_lines(tmp_path / "in", [line_of(str(s), {**ONCE, "seed": s}) for s in range(6)])
    with pytest.raises(EngineDeadError, match=r"the engine has stopped: the device is gone"):
        run_batch(input_, tmp_path / "out", engine, max_num_seqs=1)
    assert results_of(tmp_path / "out").keys() <= {"0", "1"}
    run_batch(input_, tmp_path / "out")
    assert [one["status_code"] for one in results_of(tmp_path / "out").values()] == [200] * 6


def test_cancelled_is_all_that_is_in_flight_and_nothing_is_lost(tmp_path: Path) -> None:
    def script(request: EngineRequest) -> Script:
        return by_seed(request) if request.seed < 3 else Script(text="x" * 99, holds_at=1)

    input_ = write_lines(tmp_path / "in", [line_of(str(s), {**ONCE, "seed": s}) for s in range(9)])
    engine = FakeEngine(script)
    state = ServerState(settings=Settings(max_num_seqs=2), engine=engine, text=FakeText())
    requests = BatchRequests(input_, max_line_bytes=1000)

    async def cancelled() -> None:
        task = asyncio.create_task(answer_all(state, requests.without(results.held), results.add))
        while engine.running < 4 or len(results.held) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.running == 0
        assert engine.is_draining

    with BatchResults(tmp_path / "out", requests.ids) as results:
        run(cancelled())
    assert results_of(tmp_path / "out").keys() == {"0", "1", "2"}
    assert len(run_batch(input_, tmp_path / "out").requests) == 6
    assert len(results_of(tmp_path / "out")) == 9


GOOD = json.dumps(line_of("a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "in holds no request; give one JSON object per line."),
        ("\n \n", "in holds no request"),
        (GOOD + '\n{"custom_id": ', "in, line 2: the line is not valid JSON: Expecting value"),
        (GOOD + "\n\n[1]", "in, line 3: the line is not a JSON object"),
        (GOOD.replace("7", "NaN"), "in, line 1: the line holds NaN, which JSON does not have."),
        ('{"custom_id": "a", "custom_id": "b"}', "in, line 1: the name 'custom_id' stands twice"),
        (GOOD + "\n" + GOOD, "in, line 2: custom_id 'a' was given before; rename it."),
        (json.dumps(line_of("a", boby=1)), "line 1: unknown field 'boby'; did you mean 'body'?"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "line 1: body is missing"),
        (json.dumps(line_of("")), "line 1: custom_id is ''; it must be a text that is not empty."),
        (json.dumps(line_of("a") | {"custom_id": 7}), "line 1: custom_id is 7; it must be a text"),
        (json.dumps(line_of("a") | {"method": "GET"}), "line 1: method is 'GET'; it must be 'POST'."),
        (json.dumps(line_of("a", url="/v1/embeddings")), "url is '/v1/embeddings'; it must be /v1/chat"),
        (json.dumps(line_of("a") | {"body": [1]}), "line 1: body is a list; it must be an object"),
        (GOOD + "\n" + json.dumps(line_of("b" * 999)), "line 2: the line has more than 400 bytes; raise"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_with_the_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(InputError) as caught:
        BatchRequests(tmp_path / "in", max_line_bytes=400)
    assert message in str(caught.value)


def test_bytes_that_are_not_utf8_and_things_that_are_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'{"custom_id": "\xff"}')
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("in", "in, line 1: the line is not UTF-8: byte 0xff"),
        ("nothing", "nothing cannot be read: No such file or directory."),
        ("pipe", "pipe is not a file; it is read twice, so a pipe will not do."),
        (".", "is not a file"),
    ):
        with pytest.raises(InputError, match=message):
            BatchRequests(tmp_path / name, max_line_bytes=400)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    input_ = write_lines(tmp_path / "in", [line_of("a"), line_of("b")])
    for lines in ([line_of("a")], [line_of("a"), line_of("b"), line_of("c")]):
        requests = BatchRequests(write_lines(input_, [line_of("a"), line_of("b")]), max_line_bytes=400)
        write_lines(input_, lines)
        with pytest.raises(InputError, match="in was changed while it was read"):
            list(requests.without(()))


def test_of_a_large_file_only_the_ids_are_in_memory(tmp_path: Path) -> None:
    body = {**ONCE, "prompt": "x" * 100_000}
    with (tmp_path / "in").open("w") as file:
        for number in range(200):
            file.write(json.dumps(line_of(str(number), body)) + "\n")
    tracemalloc.start()
    try:
        requests = BatchRequests(tmp_path / "in", max_line_bytes=200_000)
        assert sum(1 for _ in requests.without(())) == 200
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < (tmp_path / "in").stat().st_size / 10


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A file with the results of a and b."""
    run_batch(write_lines(tmp_path / "in", [line_of("a"), line_of("b")]), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"a note", "out, line 1 is not a result of run-batch; choose another file."),
        (GOOD.encode(), "out, line 1 is not a result"),
        (b"\n", "out, line 1 is not a result"),
        (b"\x00" * 4096, "out, line 1 is not a result"),
        (b'{"id": "batch_req_1", "custom_id": "a"}\n', "out, line 1 is not a result"),
        (b'{"id": "batch_req_1", "custom_id": "a", "response": null, "error": {}}\n', "line 1 is not"),
        (b'{"id": "batch_req_1", "custom_id": 3, "response": {"status_code": 200}}\n', "line 1 is not"),
        (b'{"id": "batch_req_\n', "out, line 1 is not a result"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(
    raw: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "out").write_bytes(raw)
    with pytest.raises(InputError) as caught:
        BatchResults(tmp_path / "out", {"a"})
    assert message in str(caught.value)
    assert (tmp_path / "out").read_bytes() == raw


def test_results_of_other_requests_are_refused(held: Path) -> None:
    with pytest.raises(
        InputError, match=r"out, line \d is the result of 'b', which is not among the requests"
    ):
        BatchResults(held, {"a", "c"})
    held.write_bytes(held.read_bytes() * 2)
    with pytest.raises(InputError, match=r"out, line 3 is a second result of '[ab]'; remove one"):
        BatchResults(held, {"a", "b"})


def test_two_runs_do_not_write_one_file(held: Path) -> None:
    with (
        BatchResults(held, {"a", "b"}),
        pytest.raises(InputError, match="out is being written by another process; wait for it, or choose"),
    ):
        BatchResults(held, {"a", "b"})
    with BatchResults(held, {"a", "b"}) as after:
        assert after.held == {"a", "b"}


@pytest.mark.parametrize("tail", [bytes(4096), b'{"id": "batch_req_1' + bytes(700) + b'null}\n{"id": "batch'])
def test_blocks_lost_with_the_power_are_dropped(tail: bytes, held: Path) -> None:
    before = held.read_bytes()
    held.write_bytes(before + tail)
    with BatchResults(held, {"a", "b", "c"}) as results:
        assert results.held == {"a", "b"}
    assert held.read_bytes() == before


def test_a_file_that_begins_with_zeros_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(bytes(4096))
    with pytest.raises(InputError, match=r"disk\.img, line 1 is not a result"):
        BatchResults(tmp_path / "disk.img", {"a"})
    assert (tmp_path / "disk.img").read_bytes() == bytes(4096)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("none/out", "out cannot be written: No such file or directory."),
        (".", "is not a file; results need one, so that a run can go on."),
        ("pipe", "pipe is not a file"),
    ):
        with pytest.raises(InputError, match=message):
            BatchResults(tmp_path / name, set())


def test_a_disk_that_is_full_in_the_middle_of_a_line_loses_nothing(held: Path, tmp_path: Path) -> None:
    before = held.read_bytes()
    input_ = write_lines(tmp_path / "in", [line_of("a"), line_of("b"), line_of("c")])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limits[1]))
    try:
        with pytest.raises(
            InputError, match=r"out cannot be written: File too large\. Free some space; the same"
        ):
            run_batch(input_, held)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(held.read_bytes()) == len(before) + 30, "a torn line"
    run_batch(input_, held)
    assert held.read_bytes().startswith(before)
    assert results_of(held).keys() == {"a", "b", "c"}
