"""Keys from a file: named, limited, read again; one key's use harms no other."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from dgemma.errors import InputError
from dgemma.server.http.api_key import ApiKey, KeyLimits
from dgemma.server.http.auth import ApiKeyAuth, read_keys
from dgemma.server.http.errors import ApiError
from dgemma.server.http.rate_limits import Bucket, RateLimits
from server.fake_engine import FakeEngine, Script
from server.served import CHAT, HELLO, app_of, client_of, error_of, post, run_unhurried


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# name key limits\n\nalice sk-a requests_per_minute=60 max_num_seqs=2\nbob sk-b\n")
    return path


def test_a_file_has_names_keys_and_limits(file: Path) -> None:
    alice, bob = read_keys(file, KeyLimits(tokens_per_minute=5.0))
    assert (alice.name, bob.name) == ("alice", "bob")
    assert alice.limits == KeyLimits(requests_per_minute=60.0, max_num_seqs=2, tokens_per_minute=5.0)
    assert bob.limits == KeyLimits(tokens_per_minute=5.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "line 1 of the API key file"),
        ("al/ice sk-secret", "line 1 of the API key file"),
        ("\nalice sk-secret request_per_minute=3", "line 2 .* did you mean 'requests_per_minute'"),
        ("alice sk-secret requests_per_minute=-3", "must be a number above 0"),
        ("alice sk-secret max_num_seqs=1.5", "must be a number above 0"),
        ("alice sk-secret\nalice sk-other", "has the name 'alice' again"),
        ("alice sk-secret\nbob sk-secret", "one key under two names"),
        ("# nobody", "has no key"),
    ],
)
def test_a_wrong_line_is_named_and_never_shows_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_keys(tmp_path / "keys")
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        app_of(api_key_file=tmp_path / "none")


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    auth = ApiKeyAuth([], file, clock=lambda: now)

    def knows(key: str) -> bool:
        scope = {"path": CHAT, "headers": [(b"authorization", f"Bearer {key}".encode())]}
        try:
            return auth.check(scope).name != ""
        except ApiError:
            return False

    assert knows("sk-a")
    file.write_text("carol sk-carol-123\n")
    assert knows("sk-a"), "not looked at within the second"
    now = 2.0
    assert not knows("sk-a")
    assert knows("sk-carol-123")
    logger = logging.getLogger("dgemma.server")
    logger.propagate = True
    file.write_text("carol sk-carol-123 and something else\n")
    now = 4.0
    assert knows("sk-carol-123"), "the keys of before stay"
    assert "the keys of before stay" in caplog.text
    assert "sk-carol" not in caplog.text
    file.unlink()
    now = 6.0
    assert knows("sk-carol-123")


def test_requests_are_counted_and_logged_by_the_keys_name(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_of(api_key_file=file)
    logging.getLogger("dgemma.server").propagate = True
    with caplog.at_level(logging.INFO, "dgemma.server"):
        response = post(app, CHAT, HELLO, headers=bearer("sk-b"))
    tokens = response.json()["usage"]
    page = app.state.metrics.render(app.state.engine.stats(), num_active=0)
    assert 'dgemma_key_requests_total{key="bob",status="200"} 1.0' in page
    assert f'dgemma_key_tokens_total{{key="bob",kind="prompt"}} {tokens["prompt_tokens"]}.0' in page
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    assert line.facts["key"] == "bob"  # type: ignore[attr-defined]
    assert "sk-b" not in page + caplog.text


def test_requests_per_minute_are_kept_for_each_key_alone(file: Path) -> None:
    file.write_text("alice sk-a requests_per_minute=2\nbob sk-b\n")
    app = app_of(api_key_file=file)
    assert [post(app, CHAT, HELLO, headers=bearer("sk-a")).status_code for _ in range(3)] == [200, 200, 429]
    refused = post(app, CHAT, HELLO, headers=bearer("sk-a"))
    assert error_of(refused)["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert post(app, CHAT, HELLO, headers=bearer("sk-b")).status_code == 200


def test_tokens_per_minute_are_charged_at_the_end_of_an_answer(file: Path) -> None:
    file.write_text("alice sk-a tokens_per_minute=1\n")
    app = app_of(api_key_file=file)
    assert post(app, CHAT, HELLO, headers=bearer("sk-a")).status_code == 200
    assert post(app, CHAT, HELLO, headers=bearer("sk-a")).status_code == 429


def test_a_bucket_refills_with_time_and_a_clock_that_jumps_back_changes_nothing() -> None:
    now = 100.0
    bucket = Bucket(60, lambda: now)
    bucket.spend(60)
    assert bucket.wait_s(1) == pytest.approx(1.0)
    now = 101.0
    assert bucket.wait_s(1) == 0
    bucket.spend(121)
    assert bucket.wait_s() == pytest.approx(120.0)
    now = 50.0
    assert bucket.wait_s() == pytest.approx(120.0)
    now = 1e9
    assert bucket.wait_s(60) == 0
    assert bucket.wait_s(61) == pytest.approx(1.0)


def test_new_limits_of_a_key_begin_anew() -> None:
    limits = RateLimits()
    first = ApiKey(name="a", digest=b"", limits=KeyLimits(requests_per_minute=1))
    limits.of(first).admit()
    with pytest.raises(ApiError):
        limits.of(first).admit()
    limits.of(ApiKey(name="a", digest=b"", limits=KeyLimits(requests_per_minute=2))).admit()


def test_one_key_may_hold_half_of_the_requests_in_progress(file: Path) -> None:
    engine = FakeEngine(Script(text="x" * 20, delay_s=0.5))
    app = app_of(engine, api_key_file=file, max_concurrent_requests=4)

    async def asked() -> list[int]:
        async with client_of(app) as client:
            greedy = [client.post(CHAT, json=HELLO, headers=bearer("sk-b"), timeout=60) for _ in range(3)]
            modest = client.post(CHAT, json=HELLO, headers=bearer("sk-a"), timeout=60)
            return [response.status_code for response in await asyncio.gather(*greedy, modest)]

    found = run_unhurried(asked())
    assert sorted(found[:3]) == [200, 200, 429]
    assert found[3] == 200


def test_the_engine_learns_whose_request_it_is_and_prefixes_are_salted_with_it(file: Path) -> None:
    engine = FakeEngine()
    app = app_of(engine, api_key_file=file)
    post(app, CHAT, HELLO, headers=bearer("sk-a"))
    post(app, CHAT, HELLO, headers=bearer("sk-b"))
    alice, bob = engine.requests
    assert (alice.tenant, alice.cache_salt, alice.max_tenant_seqs) == ("alice", "alice", 2)
    assert (bob.tenant, bob.cache_salt, bob.max_tenant_seqs) == ("bob", "bob", None)
    shared = FakeEngine()
    post(app_of(shared, api_key_file=file, share_prefixes=True), CHAT, HELLO, headers=bearer("sk-a"))
    assert (shared.requests[0].tenant, shared.requests[0].cache_salt) == ("alice", "")
    anonymous = FakeEngine()
    post(app_of(anonymous), CHAT, HELLO)
    assert (anonymous.requests[0].tenant, anonymous.requests[0].cache_salt) == ("", "")


# Compiling


def test_compile_seconds_are_limited_by_key(file: Path) -> None:
    file.write_text("alice sk-a compile_seconds_per_minute=0.001\nbob sk-b\n")
    app = app_of(api_key_file=file)
    usage = app.state.rate_limits.of(read_keys(file)[0])
    usage.spend_compile_s(5.0)
    constrained = {**HELLO, "regex": "[a-c]{3}"}
    assert post(app, CHAT, constrained, headers=bearer("sk-a")).status_code == 429
    assert post(app, CHAT, HELLO, headers=bearer("sk-a")).status_code == 200
    assert post(app, CHAT, constrained, headers=bearer("sk-b")).status_code == 200
