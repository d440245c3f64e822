"""However many ask at once, each gets the answer to its own prompt and seed."""

from __future__ import annotations

import asyncio
from typing import Any

from server.fake_engine import FakeEngine, FakeText, answer_text
from server.served import CHAT, app_of, client_of, events_of, joined, run


def test_answers_of_requests_at_once_are_not_crossed() -> None:
    engine = FakeEngine()

    async def ask(client: Any, seed: int) -> None:
        messages = [{"role": "user", "content": f"Question {seed % 5}"}]
        n = 1 + seed % 3
        body = {"model": "dgemma", "messages": messages, "seed": seed, "n": n}
        body |= {"stream": True, "diffusing": seed % 4 == 0} if seed % 2 else {}
        response = await client.post(CHAT, json=body, headers={"x-request-id": f"request-{seed}"})
        assert response.headers["x-request-id"] == f"request-{seed}"
        if seed % 2:
            chunks = events_of(response)
            texts = [joined(chunks, "content", index) for index in range(n)]
        else:
            texts = [choice["message"]["content"] for choice in response.json()["choices"]]
        prompt = FakeText().render_chat(messages).tokens
        assert texts == [answer_text(seed + index, prompt) for index in range(n)]

    async def all_at_once() -> None:
        async with client_of(app_of(engine)) as client:
            await asyncio.gather(*(ask(client, seed) for seed in range(60)))

    run(all_at_once())
    assert len({request.id for request in engine.requests}) == len(engine.requests) == 120
    assert engine.running == 0
    assert engine.cancelled == []
