"""A chat reads only what is new, and answers as if it had read everything."""

from __future__ import annotations

from typing import Any

import pytest

import dgemma
from dgemma import LanguageModel
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random

OPTIONS: dict[str, Any] = {"max_denoising_steps": 3, "seed": 3, "ignore_end": True}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return dgemma.load(path, exact=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("max_tokens", [20, 100], ids=["one canvas", "several"])
def test_the_next_turn_starts_behind_the_last_prompt_and_changes_no_text(
    lm: LanguageModel, max_tokens: int
) -> None:
    chat = [user("Tell me about the sea."), assistant(""), user("And the sky?")]
    first = lm.chat(chat[:1], max_tokens=max_tokens, **OPTIONS)
    assert first.cached_tokens == 0
    chat[1] = assistant(first.text)
    second = lm.chat(chat, max_tokens=max_tokens, **OPTIONS)
    assert second.cached_tokens >= first.prompt_tokens
    fresh = lm.exact().chat(chat, max_tokens=max_tokens, **OPTIONS)
    assert fresh.cached_tokens == 0
    assert fresh.tokens == second.tokens


def test_an_answer_the_tokenizer_would_spell_the_same_is_not_read_again(lm: LanguageModel) -> None:
    """Canonical tokens are put in the canvas's place: what a trained model mostly writes."""
    memory = lm.exact()
    chat = [user("Tell me about the sea.")]
    first = memory.chat(chat, max_tokens=100, **OPTIONS)
    prompt = tuple(memory.chat_template.render(chat))
    (_, cache), *others = memory._memory._kept
    assert cache.lengths == (len(prompt),)
    assert len(others) == 1
    tokens, longer = others[0]
    assert len(tokens) > len(prompt), "several canvases were committed"
    assert tokens[: len(prompt)] == prompt
    assert tokens[len(prompt) :] == first.tokens[: len(tokens) - len(prompt)]
    assert longer.lengths == (len(tokens),)
    # A prompt that goes on with just these tokens takes the longer one.
    assert memory._memory.take((*tokens, 5)) is longer


def test_another_conversation_reads_everything(lm: LanguageModel) -> None:
    lm.chat("One thing.", max_tokens=20, **OPTIONS)
    other = lm.chat("Another thing.", max_tokens=20, **OPTIONS)
    assert other.cached_tokens == 0
    same = lm.chat("Another thing.", max_tokens=20, **OPTIONS)
    assert same.tokens == other.tokens


def test_a_turn_that_was_broken_off_leaves_nothing_wrong_behind(lm: LanguageModel) -> None:
    chat = [user("Tell me about the sea.")]
    truth = lm.exact().chat(chat, max_tokens=40, **OPTIONS)
    for events in (1, 2, 5):
        stream = lm.stream_chat(chat, max_tokens=90, **OPTIONS)
        for _ in range(events):
            next(stream)
        stream.close()
        assert lm.chat(chat, max_tokens=40, **OPTIONS).tokens == truth.tokens


def test_two_answers_written_in_turn_do_not_touch_each_other(lm: LanguageModel) -> None:
    """The second prompt goes on where the first ends: it must not take a cache that is still read."""
    chat = [user("Tell me about the sea.")]
    longer = [*chat, assistant("It is wide."), user("And the sky?")]
    truth = [lm.exact().chat(messages, max_tokens=70, **OPTIONS).tokens for messages in (chat, longer)]
    first = lm.stream_chat(chat, max_tokens=70, **OPTIONS)
    next(first)
    assert lm.chat(longer, max_tokens=70, **OPTIONS).tokens == truth[1]
    *_, finish = first
    assert finish.answer.tokens == truth[0]
    assert len(lm._memory._kept) <= 2, "what is remembered does not grow"
