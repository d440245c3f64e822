"""A server with OpenAI's API against our model: log-probabilities and seeds, all that such an API shows.

Requests go to POST /v1/completions, with prompts of token ids.

- `seed/repeat` the same request twice gives the same answer; `seed/other` another seed gives another one.
- `L/first/logprobs` the log-probabilities of the first token after L tokens, by the causal pass. They do not
  depend on a seed.
- `L/opening/text`, `L/opening/logprobs` a canvas of one step after L tokens; `generation/text` two canvases
  with all their steps. They depend on how seeds become draws: only servers that draw as we do are compared.

Texts are compared as code points. Of log-probabilities the sorted values are, since names of tokens differ
between servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dgemma.bench.server_client import base_url, find_model, open_client
from dgemma.conform.case import SEED, context_lengths
from dgemma.conform.compare import Conformance, compare
from dgemma.conform.runtimes import OtherRuntimeError
from dgemma.events import Answer
from dgemma.language_model import LanguageModel
from dgemma.loading import load

NUM_LISTED = 5  # the most that OpenAI's completions list
OTHER_SEEDS = (SEED + 1, SEED + 2, SEED + 3)
TIMEOUT_S = 600.0
_REFUSED = (400, 404, 422, 501)
Tensors = dict[str, Tensor]
Choice = Mapping[str, Any]


def conform_server(url: str, model: str, api_key: str | None = None) -> Conformance:
    """Compare the first model that the server lists with the checkpoint MODEL, in fp32."""
    lm = load(model, dtype="float32", device="cpu")
    return asyncio.run(_Comparison(lm, base_url(url), api_key).run())


class _Comparison:
    def __init__(self, lm: LanguageModel, base: str, api_key: str | None) -> None:
        self._lm = lm
        self._base = base
        self._client = open_client(base, api_key)
        self._served = ""
        self._expected: Tensors = {}
        self._found: Tensors = {}
        self._notes: dict[str, None] = {}  # a set in order

    async def run(self) -> Conformance:
        async with self._client:
            self._served = await find_model(self._client, None)
            config = self._lm.config
            generator = torch.Generator().manual_seed(0)
            prompts = [
                torch.randint(config.vocab_size, (length,), generator=generator).tolist()
                for length in context_lengths(min(config.window, 64))
            ]
            is_ours = await self._seeds(prompts[0])
            for prompt in prompts:
                await self._first(prompt, is_ours)
            for prompt in prompts:
                await self._canvas(
                    f"{len(prompt)}/opening", prompt, config.canvas_len, is_ours, max_denoising_steps=1
                )
            await self._canvas("generation", prompts[-1], 2 * config.canvas_len, is_ours)
        return compare(self._base, self._expected, self._found, notes=tuple(self._notes))

    async def _seeds(self, prompt: list[int]) -> bool:
        """-> whether the server draws as we do."""
        self._expected |= {"seed/repeat": _yes(True), "seed/other": _yes(True)}
        options = {"max_tokens": self._lm.config.canvas_len}
        seeds = (SEED, SEED, *OTHER_SEEDS)
        answers = [await self._ask(prompt, seed=seed, **options) for seed in seeds]
        first, again, *others = answers
        if first is None or again is None:
            self._note("the server takes no prompt of token ids with a seed: seeds are not compared")
            return False
        self._found["seed/repeat"] = _yes(first["text"] == again["text"])
        self._found["seed/other"] = _yes(any(o is not None and o["text"] != first["text"] for o in others))
        is_ours = isinstance(first.get("dgemma"), dict)
        if not is_ours:
            self._note("the server is not dgemma: its draws are its own, so canvases are not compared")
        return is_ours

    async def _first(self, prompt: list[int], is_ours: bool) -> None:
        options: dict[str, Any] = {"max_tokens": 1, "logprobs": NUM_LISTED, "seed": SEED, "temperature": 1.0}
        ours = self._lm.generate(prompt, decode="causal", ignore_end=True, **options)
        name = f"{len(prompt)}/first/logprobs"
        self._expected[name] = _values(ours)
        own = {"decode": "causal", "ignore_end": True} if is_ours else {}
        self._add_logprobs(name, await self._ask(prompt, **options, **own))

    async def _canvas(self, name: str, prompt: list[int], count: int, is_ours: bool, **options: Any) -> None:
        options |= {"max_tokens": count, "logprobs": NUM_LISTED, "seed": SEED, "ignore_end": True}
        ours = self._lm.generate(prompt, **options)
        self._expected |= {f"{name}/logprobs": _values(ours), f"{name}/text": _points(ours.text)}
        choice = await self._ask(prompt, **options) if is_ours else None
        if choice is not None:
            self._add_logprobs(f"{name}/logprobs", choice)
            self._found[f"{name}/text"] = _points(choice["text"])

    async def _ask(self, prompt: list[int], **options: Any) -> Choice | None:
        """The answer's only choice, or nothing if the server refuses the request."""
        import httpx2

        body = {"model": self._served, "prompt": prompt, **options}
        try:
            response = await self._client.post("/completions", json=body, timeout=TIMEOUT_S)
        except (httpx2.HTTPError, OSError) as error:
            raise OtherRuntimeError(f"{self._base} broke off: {type(error).__name__}: {error}") from None
        if response.status_code in _REFUSED:
            names = ", ".join(options)
            self._note(f"the server answers {response.status_code} to a completion with {names}")
            return None
        if response.status_code != 200:
            raise OtherRuntimeError(f"{self._base} answers {response.status_code} to a completion.")
        try:
            choice = response.json()["choices"][0]
            is_text = isinstance(choice["text"], str)
        except (ValueError, LookupError, TypeError, RecursionError):
            is_text = False
        if not is_text:
            raise OtherRuntimeError(f"{self._base} answers with what is not a completion.")
        return dict(choice)

    def _add_logprobs(self, name: str, choice: Choice | None) -> None:
        if choice is None:
            return
        try:
            rows = [
                sorted(map(float, row.values()), reverse=True) for row in choice["logprobs"]["top_logprobs"]
            ]
        except (LookupError, TypeError, ValueError, AttributeError):
            rows = []
        if not rows or any(len(row) != NUM_LISTED for row in rows):
            self._note(f"the server does not give {NUM_LISTED} log-probabilities for each token")
            return
        self._found[name] = torch.tensor(rows)

    def _note(self, note: str) -> None:
        self._notes[note] = None


def _yes(is_so: bool) -> Tensor:
    return torch.tensor([int(is_so)])


def _points(text: str) -> Tensor:
    return torch.tensor(list(map(ord, text)), dtype=torch.int64)


def _values(answer: Answer) -> Tensor:
    assert answer.logprobs is not None
    rows = [sorted((value for _, value in row), reverse=True) for row in answer.logprobs]
    return torch.tensor(rows)
