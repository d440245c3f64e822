"""Schemathesis reads the description of a server and asks all that it allows, and what it does not.

The borders of every field are thousands of requests, so they come to an engine that answers at once; drawn
requests, and the borders of every number, come to a real one.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.fake_engine import FakeEngine
from server.real_server import RealServer, serving, write_model
from server.served import COMPLETIONS, on_a_port
from server.test_images import GEOMETRY, seeing
from sizes import IS_FULL, cases

KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
# One short canvas per answer, and gaps that end when their time is up.
LIMITS = ("--max-model-len", "64", "--max-choices", "2", "--request-timeout", "5")
# What has the described form may still be unanswerable: a chat that ends with the assistant's turn.
NOT_CHECKED = "positive_data_acceptance"
# They take what /v1/completions and /v1/decisions take: their borders are the same.
SAME_BORDERS = """
[[operations]]
include-path-regex = "/v1/(fim/completions|systemone)"
phases.coverage.enabled = false
"""


def run(directory: Path, address: str, *options: str) -> None:
    (directory / "schemathesis.toml").write_text(SAME_BORDERS)
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json",
            "--header", f"Authorization: Bearer {KEY}", *options,
            "--checks", "all", "--exclude-checks", NOT_CHECKED, "--seed", "1",
            "--continue-on-failure", "--suppress-health-check", "all", "--generation-database", "none",
            "--warnings", "off", "--no-color", "--request-timeout", "120",
        ],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny", steps=1)
    with serving(str(model), *LIMITS, environment={"DGEMMA_API_KEY": KEY}) as server:
        yield server


@pytest.mark.skipif(not IS_FULL, reason="make test-full")
def test_no_border_that_is_described_makes_a_5xx_or_an_undescribed_reply(tmp_path: Path) -> None:
    """Replies have a described status, type and form, what breaks the description is refused, and nothing is
    open without a key."""
    engine = FakeEngine(adapters=("sums",), max_positions=64, image_settings=GEOMETRY)
    app, _ = seeing(engine, api_keys=(KEY,), max_choices=2, request_timeout_s=5)
    with on_a_port(app) as address:
        run(tmp_path, address, "--phases", "coverage")
    statuses: Counter[int] = Counter()
    for family in app.state.metrics.requests.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                statuses[int(sample.labels["status"])] += int(sample.value)
    assert not [status for status in statuses if status >= 500]
    # It came to the engine, and it came to many refusals.
    assert statuses[200] > 200
    assert statuses[400] > 500
    assert len(engine.requests) > 200


def test_nothing_that_is_drawn_from_the_description_makes_a_5xx_of_a_real_engine(
    server: RealServer, tmp_path: Path
) -> None:
    run(tmp_path, server.address, "--phases", "fuzzing", "--max-examples", str(cases(12, 6)))
    statuses = Counter(entry["status"] for entry in server.log() if entry["event"] == "request")
    assert not [status for status in statuses if status >= 500]
    assert statuses[200] > 10
    assert statuses[400] > 25


def test_a_real_engine_answers_at_the_borders_of_every_number(server: RealServer) -> None:
    page = httpx2.get(f"{server.address}/openapi.json", headers=HEADERS, timeout=60).json()
    described = page["components"]["schemas"]
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 9}
    number = 0
    for name, schema in described["CompletionRequest"]["properties"].items():
        numeric = [way for way in schema.get("anyOf", []) if way.get("type") in ("integer", "number")]
        borders = [way[key] for way in numeric for key in ("minimum", "maximum") if key in way]
        for value in borders:
            body = {**asked, "decode": "causal" if name == "top_k" else "diffuse", name: value}
            if name == "max_tokens":  # 0 writes nothing
                body["echo"] = True
            if name == "t_min":  # t_max is never below it
                body["t_max"] = 100
            if name == "t_max":
                body["t_min"] = 0
            if (name, value) == ("max_tokens", 0):  # something must be asked for
                body["echo"] = True
            response = httpx2.post(f"{server.address}{COMPLETIONS}", json=body, headers=HEADERS, timeout=60)
            assert response.status_code == 200, (name, value, response.text)
            number += 1
    assert number > 24
