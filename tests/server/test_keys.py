"""A wrong key gets nothing: no answer, no hint in the refusal, and none in the time that it takes."""

from __future__ import annotations

import hmac
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from dgemma.server.http import auth
from dgemma.server.http.auth import ApiKeyAuth
from dgemma.server.http.errors import ApiError
from server.served import CHAT, HELLO, app_of, post

KEY = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=512))
# How many leading characters are right. All guesses are as long as the key.
RIGHT = (0, 1, 256, 500, 511)


def guess(right: int) -> str:
    return KEY[:right] + "." * (len(KEY) - right)


def scope(key: str) -> dict[str, Any]:
    return {"path": CHAT, "headers": [(b"authorization", f"Bearer {key}".encode())]}


def medians(compare: Callable[[str], object], rounds: int = 300, calls: int = 20) -> dict[int, float]:
    """Seconds of `calls` guesses, by how much of them is right. In turn and in changing order, so that what
    else the machine does meets all alike."""
    taken: dict[int, list[float]] = {right: [] for right in RIGHT}
    guesses = {right: guess(right) for right in RIGHT}
    rng = random.Random(2)
    for _ in range(rounds):
        for right in rng.sample(RIGHT, len(RIGHT)):
            began = time.perf_counter()
            for _ in range(calls):
                compare(guesses[right])
            taken[right].append(time.perf_counter() - began)
    return {right: statistics.median(seconds) for right, seconds in taken.items()}


def spread(found: dict[int, float]) -> float:
    return max(found.values()) / min(found.values())


def test_the_time_of_a_refusal_does_not_tell_how_much_of_a_key_is_right() -> None:
    known = ApiKeyAuth(["another", KEY])

    def refuse(key: str) -> None:
        with pytest.raises(ApiError):
            known.check(scope(key))

    # Another look if the machine was busy with something else: a leak would be there in each of them.
    looks = [spread(medians(refuse))]
    while looks[-1] > 1.2 and len(looks) < 10:
        looks.append(spread(medians(refuse)))
    assert min(looks) <= 1.2, looks


def test_such_a_look_finds_a_comparison_that_ends_at_the_first_difference() -> None:
    def leaky(key: str) -> bool:
        return all(given == known for given, known in zip(key, KEY, strict=True))

    found = medians(leaky, rounds=20)
    assert found[511] > 2 * found[0]


def test_digests_of_one_length_are_compared_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key fits, and however long what was sent is."""
    compared: list[tuple[int, int]] = []

    def noted(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return hmac.compare_digest(first, second)

    monkeypatch.setattr(auth, "hmac", type("Hmac", (), {"compare_digest": staticmethod(noted)}))
    known = ApiKeyAuth(["first", "second", KEY])
    for key in ("first", KEY):
        known.check(scope(key))
    for key in ("", "f", KEY * 10):
        with pytest.raises(ApiError):
            known.check(scope(key))
    assert compared == [(32, 32)] * 15


def test_the_refusals_of_all_wrong_keys_are_the_same_and_tell_nothing() -> None:
    app = app_of(api_keys=("another", KEY))
    wrong = [*(guess(right) for right in RIGHT), KEY[:-1], KEY + "x", "", "another key"]
    bodies = set()
    for key in wrong:
        response = post(app, CHAT, HELLO, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 401
        assert response.headers.keys() == {
            "content-type",
            "content-length",
            "www-authenticate",
            "x-request-id",
        }
        bodies.add(response.content)
    assert len(bodies) == 1
    assert b"another" not in bodies.pop()


@pytest.mark.parametrize(
    "header", [b"Basic KEY", b"KEY", b"Bearer", b"Bearer-KEY", b"BearerKEY", b"", b" KEY"]
)
def test_a_key_under_another_scheme_is_refused(header: bytes) -> None:
    known = ApiKeyAuth(["KEY"])
    with pytest.raises(ApiError):
        known.check({"path": CHAT, "headers": [(b"authorization", header)]})


@pytest.mark.parametrize("header", [b"Bearer KEY", b"bearer KEY", b"BEARER  KEY "])
def test_the_schemes_case_and_blanks_around_a_key_do_not_matter(header: bytes) -> None:
    ApiKeyAuth(["KEY"]).check({"path": CHAT, "headers": [(b"authorization", header)]})


@pytest.mark.parametrize("headers", [("KEY", "KEY"), ("KEY", "other"), ("other", "KEY")])
def test_two_authorization_headers_are_refused(headers: tuple[str, str]) -> None:
    """A proxy may have checked one, and this server another."""
    sent = [(b"authorization", f"Bearer {key}".encode()) for key in headers]
    with pytest.raises(ApiError):
        ApiKeyAuth(["KEY"]).check({"path": CHAT, "headers": sent})
