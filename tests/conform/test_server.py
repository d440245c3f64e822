"""A server over a real socket: ours conforms; a changed weight, ignored seeds, missing fields are named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import dgemma
from dgemma.cli.main import main
from dgemma.conform.runtimes import OtherRuntimeError
from dgemma.conform.server import conform_server
from dgemma.errors import InputError
from server.real_server import serving, write_model

Reply = tuple[int, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with serving(str(model), "--dtype", "float32") as server:
        yield f"{server.address}/v1"


def test_our_own_server_conforms_and_nothing_is_left_out(
    address: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", address, str(model), "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["not_compared"] == []
    assert case["notes"] == []
    assert case["largest"] < 1e-4
    assert case["compared"] == 2 + 5 + 2 * 5 + 2, "seeds, first tokens, canvases of one step, a generation"


def test_a_changed_weight_is_caught_at_the_first_token(address: str, model: Path, tmp_path: Path) -> None:
    other = dgemma.load(model, dtype="float32")
    with torch.no_grad():
        other.transformer.layers[1].after_mlp.weight.mul_(1.2)
    other.save(tmp_path / "other")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (tmp_path / "other" / name).write_bytes((model / name).read_bytes())
    found = conform_server(address, str(tmp_path / "other"))
    assert found.parting is not None
    assert found.parting.name.endswith("/first/logprobs")
    assert "by the causal pass" in found.parting.place


# Servers that are not dgemma


@contextmanager
def scripted(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[str]:
    """A server that lists one model and answers completions as it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "model"}]})

        def do_POST(self) -> None:
            self._send(*answer(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def _send(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def completion(text: str, top: list[dict[str, float]] | None = None, **more: Any) -> Reply:
    logprobs = None if top is None else {"top_logprobs": top}
    return 200, {"choices": [{"text": text, "logprobs": logprobs, **more}]}


@pytest.fixture(scope="module")
def lm(model: Path) -> dgemma.LanguageModel:
    return dgemma.load(model, dtype="float32")


def test_a_left_to_right_server_of_the_same_weights_passes_and_its_canvases_are_not_compared(
    lm: dgemma.LanguageModel, model: Path
) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        assert set(body) <= {"model", "prompt", "max_tokens", "seed", "logprobs", "temperature"}
        if "logprobs" not in body:
            return completion(f"text of seed {body['seed']}")
        ours = lm.generate(body["prompt"], decode="causal", max_tokens=1, logprobs=5, ignore_end=True)
        assert ours.logprobs is not None
        return completion("x", [{str(token): value for token, value in ours.logprobs[0]}])

    with scripted(answer) as url:
        found = conform_server(url, str(model))
    assert found.passed
    assert found.compared == 2 + 5
    assert found.not_compared_kinds == (
        "canvases of one step: logprobs", "canvases of one step: text", "a whole generation",
    )  # fmt: skip
    assert found.notes == ("the server is not dgemma: its draws are its own, so canvases are not compared",)


def test_a_server_without_log_probabilities_says_so_and_seeds_alone_are_compared(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(lambda body: completion(f"text of seed {body['seed']}")) as url:
        assert main(["conform", url, str(model)]) == 0
    out = capsys.readouterr().out
    assert "not compared: first tokens: logprobs, canvases of one step" in out
    assert "does not give 5 log-probabilities for each token" in out


def test_a_server_that_ignores_seeds_is_named(model: Path) -> None:
    answers = iter(range(1000))
    with scripted(lambda _: completion(f"answer {next(answers)}")) as url:
        found = conform_server(url, str(model))
    assert found.parting is not None
    assert found.parting.place == "seeds: the same request and seed have two answers"
    with scripted(lambda _: completion("always this")) as url:
        found = conform_server(url, str(model))
    assert found.parting is not None
    assert found.parting.place == "seeds: every seed has the same answer"


def test_a_server_that_refuses_everything_has_nothing_compared_and_does_not_pass(model: Path) -> None:
    with scripted(lambda _: (400, {"error": {"message": "no"}})) as url:
        found = conform_server(url, str(model))
    assert found.compared == 0
    assert not found.passed
    assert "the server answers 400 to a completion with seed, max_tokens" in "; ".join(found.notes)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, {}), "answers 500 to a completion"),
        ((200, {"choices": []}), "not a completion"),
        ((200, []), "not a completion"),
        (completion(7), "not a completion"),  # type: ignore[arg-type]
    ],
)
def test_a_broken_server_is_one_line(reply: Reply, message: str, model: Path) -> None:
    with scripted(lambda _: reply) as url, pytest.raises(OtherRuntimeError, match=message):
        conform_server(url, str(model))


def test_an_address_where_nobody_answers_is_one_line(model: Path) -> None:
    with pytest.raises(InputError, match="does not answer"):
        conform_server("http://127.0.0.1:9/v1", str(model))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["http://127.0.0.1:9/v1"], "give MODEL"),
        (["http://127.0.0.1:9/v1", "bundled:text", "--geometries", "2"], "not for a server"),
        (["transformers", "--api-key-file", "x"], "is for a server"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", *argv]) == 2
    assert message in capsys.readouterr().err
