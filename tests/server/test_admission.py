"""Admission counts requests exactly: no place is lost, and a drain ends when the last request does."""

from __future__ import annotations

import asyncio

import pytest

from dgemma.server.http.admission import Admission
from dgemma.server.http.errors import ApiError


def test_places_are_taken_and_given_back() -> None:
    admission = Admission(2, 1 << 20)
    with admission.admit():
        with admission.admit():
            assert admission.num_active == 2
            with pytest.raises(ApiError) as caught, admission.admit():
                pass
            assert caught.value.status == 429
            assert caught.value.headers["retry-after"] == "1"
            assert admission.num_active == 2, "a refusal holds no place"
        assert admission.num_active == 1
        with admission.admit():
            pass
    assert admission.num_active == 0


def test_a_request_that_fails_gives_its_place_back() -> None:
    admission = Admission(1, 1 << 20)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), admission.admit():
            raise ZeroDivisionError
    assert admission.num_active == 0


def test_a_drain_refuses_new_requests_and_waits_for_the_last_one() -> None:
    async def drained() -> list[bool]:
        admission = Admission(4, 1 << 20)
        assert not admission.is_draining
        results = []
        with admission.admit():
            with admission.admit():
                results.append(await admission.drain(0.01))
            # One is left: the end of another is not the end of all.
            results.append(await admission.drain(0.01))
            with pytest.raises(ApiError) as caught, admission.admit():
                pass
            assert caught.value.status == 503
            waiting = asyncio.create_task(admission.drain(60))
            await asyncio.sleep(0.01)
            assert not waiting.done()
        results.append(await waiting)
        results.append(await admission.drain(0.0))
        return results

    assert asyncio.run(drained()) == [False, False, True, True]


def test_an_idle_server_is_drained_at_once() -> None:
    assert asyncio.run(Admission(1, 1 << 20).drain(60)) is True
