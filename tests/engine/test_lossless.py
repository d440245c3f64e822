"""Lossless decoding writes the causal text of the same seed, whatever the draft; what breaks it is seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dgemma.engine import causal_sampling, decode_cost
from dgemma.engine import engine as engine_module
from dgemma.engine.decode_cost import DecodeChooser, DecodeCost
from dgemma.engine.engine import Engine
from dgemma.engine.kv_cache_manager import KVCacheManager
from dgemma.engine.kv_store import KVStore
from dgemma.engine.request import EngineRequest, PinnedTokens
from dgemma.engine.scheduler import SchedulerConfig
from dgemma.engine.sequence import SequenceState
from dgemma.engine.service import Failed
from dgemma.errors import InputError
from dgemma.events import Answer, Commit, Finish
from dgemma.params import GenerationParams
from dgemma.structured_output.compiler import GrammarCompiler
from dgemma.structured_output.response_format import RegexFormat
from engine_life import CONFIG, ENCODE_BLOCK, tiny_models, tokenizer
from sizes import cases

CANVAS = CONFIG.canvas_len
NUM_REQUESTS = cases(1000, 40)


def random_request(number: int, rng: random.Random) -> EngineRequest:
    prompt = [2, *(300 + rng.randrange(2) for _ in range(6)), 106, *range(200, 208)][: rng.randint(1, 16)]
    prompt += [rng.randrange(512) for _ in range(rng.randrange(1, 5))]
    params = GenerationParams(
        max_tokens=rng.randint(1, 3 * CANVAS),
        decode="lossless",
        draft_steps=rng.randint(1, 3),
        temperature=rng.choice((0.0, 0.7, 1.0)),
        end_tokens=(1, 106, *range(400, 420)),
        stop=("a",) if rng.random() < 0.2 else (),
        top_k=5 if rng.random() < 0.2 else None,
        top_p=0.8 if rng.random() < 0.2 else None,
        logprobs=2 if rng.random() < 0.2 else None,
    )
    return EngineRequest(
        prompt=tuple(prompt),
        seed=rng.randrange(1 << 32),
        params=params,
        row=number,
        adapter="other" if rng.random() < 0.3 else None,
        logit_bias=((3, -100.0), (300 + rng.randrange(9), 9.0)) if rng.random() < 0.2 else (),
    )


def causal(request: EngineRequest) -> EngineRequest:
    return replace(request, params=replace(request.params, decode="causal"))


def run(
    requests: list[EngineRequest], *, seats: int = 4, reuse: bool = True
) -> tuple[dict[int, Answer], list[Commit]]:
    memory = KVCacheManager(full_blocks=60, window_blocks=80, block_size=4, window=CONFIG.window, reuse=reuse)
    limits = SchedulerConfig(max_num_seqs=seats, chunk_size=2 * ENCODE_BLOCK, encode_block=ENCODE_BLOCK)
    stacks = {name: lm.transformer for name, lm in tiny_models().items()}
    engine = Engine(stacks, memory, limits, tokenizer=tokenizer())
    for request in requests:
        engine.add(engine.validate(request))
    answers, commits = {}, []
    while not engine.is_idle:
        for _, event in engine.step():
            assert not isinstance(event, Failed), event.error
            if isinstance(event, Commit):
                commits.append(event)
            if isinstance(event, Finish):
                answers[event.row] = event.answer
    stats = engine.stats()
    assert (stats.slots_used, stats.full_blocks_used, stats.window_blocks_used) == (0, 0, 0)
    return answers, commits


def content(answer: Answer) -> tuple[Any, ...]:
    return answer.tokens, answer.text, answer.finish_reason, answer.logprobs, answer.stop_string


class Drafts:
    """Drafts that are right for a while: the causal text, with a wrong token now and then."""

    def __init__(self, texts: dict[int, tuple[int, ...]], seed: int) -> None:
        self._texts, self._rng = texts, random.Random(seed)

    def __call__(self, sequence: SequenceState) -> list[int]:
        begin, text = len(sequence.output.tokens), self._texts[sequence.request.row]
        draft = [*text[begin : begin + CANVAS], *(self._rng.randrange(512) for _ in range(CANVAS))][:CANVAS]
        if self._rng.random() < 0.7:
            draft[self._rng.randrange(CANVAS)] = self._rng.randrange(512)
        return draft


def with_drafts(monkeypatch: pytest.MonkeyPatch, drafts: Callable[[SequenceState], list[int]]) -> None:
    plain = Engine._draft
    monkeypatch.setattr(
        Engine, "_draft", lambda self, sequence, guess: plain(self, sequence, drafts(sequence))
    )


def requests_and_texts(count: int = NUM_REQUESTS) -> tuple[list[EngineRequest], dict[int, Answer]]:
    rng = random.Random(0)
    requests = [random_request(number, rng) for number in range(count)]
    texts, _ = run([causal(request) for request in requests])
    return requests, texts


@pytest.mark.parametrize(("seats", "reuse"), [(6, True), (1, False), (6, False), (1, True)][: cases(4, 2)])
def test_lossless_text_is_the_causal_text(monkeypatch: pytest.MonkeyPatch, seats: int, reuse: bool) -> None:
    requests, texts = requests_and_texts()
    with_drafts(monkeypatch, Drafts({row: answer.tokens for row, answer in texts.items()}, seed=1))
    others = [
        replace(request, row=NUM_REQUESTS + request.row, params=replace(request.params, decode=decode))
        for request in requests[:5]
        for decode in ("diffuse", "causal")
    ]
    mixed = [*requests, *others]
    random.Random(2).shuffle(mixed)
    answers, commits = run(mixed, seats=seats, reuse=reuse)
    for request in requests:
        assert content(answers[request.row]) == content(texts[request.row]), request
    kept = [commit.accepted for commit in commits if commit.accepted is not None]
    assert {0, 1, 2, CANVAS} <= set(kept), "drafts were accepted in part and as a whole"


def test_lossless_text_is_the_causal_text_with_the_models_own_drafts() -> None:
    requests, texts = requests_and_texts(cases(1000, 30))
    answers, _ = run(requests)
    assert {row: content(answer) for row, answer in answers.items()} == {
        row: content(answer) for row, answer in texts.items()
    }


def test_a_constrained_lossless_text_is_the_constrained_causal_text(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(tokenizer(), CONFIG.vocab_size, (1, 106))
    constraints = [
        compiler.compile(RegexFormat(pattern)) for pattern in ("[a-f]{2,9}", "(ab|ba|c){1,12}", "x+y?z*")
    ]
    rng = random.Random(5)
    requests = []
    for number in range(cases(300, 24)):
        plain = random_request(number, rng)
        # The request's own end tokens are those of the constraint.
        params = replace(plain.params, max_tokens=rng.randint(3, 12), end_tokens=(1, 106), stop=())
        requests.append(replace(plain, params=params, constraint=rng.choice(constraints), logit_bias=()))
    texts, _ = run([causal(request) for request in requests])
    with_drafts(monkeypatch, Drafts({row: answer.tokens for row, answer in texts.items()}, seed=4))
    answers, commits = run(requests)
    for request in requests:
        assert content(answers[request.row]) == content(texts[request.row]), request
    assert max(commit.accepted or 0 for commit in commits) == CANVAS


def test_auto_writes_the_same_text_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, texts = requests_and_texts(cases(1000, 30))
    with_drafts(monkeypatch, Drafts({row: answer.tokens for row, answer in texts.items()}, seed=3))
    monkeypatch.setattr(decode_cost, "FIRST_PAUSE", 3)
    monkeypatch.setattr(DecodeChooser, "__init__", chooser_that_pays_for(4))
    answers, commits = run(
        [replace(request, params=replace(request.params, decode="auto")) for request in requests]
    )
    assert {row: content(answer) for row, answer in answers.items()} == {
        row: content(answer) for row, answer in texts.items()
    }
    assert {answer.decode for answer in answers.values()} == {"auto"}
    both = [answer for answer in answers.values() if answer.accepted and answer.causal_tokens]
    assert len(both) > 5
    for answer in both:
        assert answer.forwards == sum(answer.steps) + len(answer.accepted) + answer.causal_tokens
        assert len(answer.tokens) >= answer.causal_tokens + sum(answer.accepted)
    assert {commit.accepted is None for commit in commits} == {True, False}


def chooser_that_pays_for(num_tokens: int) -> Callable[..., None]:
    """A canvas pays that writes so many tokens, however many steps it takes."""

    def init(self: DecodeChooser, cost: DecodeCost) -> None:
        self.cost = DecodeCost(token_s=1.0, step_s=0.0, verify_s=num_tokens)
        self.pause, self.wait = 3, 0

    return init


def differences(monkeypatch: pytest.MonkeyPatch) -> int:
    """Answers that are not the causal ones, with drafts that are right for a while."""
    requests, texts = requests_and_texts(40)
    with_drafts(monkeypatch, Drafts({row: answer.tokens for row, answer in texts.items()}, seed=1))
    answers, _ = run(requests)
    return sum(content(answers[row]) != content(text) for row, text in texts.items())


def test_no_answer_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the tests below count."""
    assert differences(monkeypatch) == 0


def test_a_token_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = causal_sampling.verify_drafts

    def verify(model: Any, sequences: Any, hidden: Any) -> Any:
        found = []
        for sequence, sample in zip(sequences, plain(model, sequences, hidden), strict=True):
            guess, accepted = sample.guess.clone(), sample.accepted
            if accepted < min(len(guess), len(sequence.draft)):
                guess[accepted] = sequence.draft[accepted]
            found.append(replace(sample, guess=guess))
        return found

    monkeypatch.setattr(engine_module, "verify_drafts", verify)
    assert differences(monkeypatch) > 10


def test_a_noise_number_used_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = causal_sampling._wanted_tokens

    def wanted(sequence: SequenceState) -> Any:
        return [replace(token, index=token.index // 2 * 2) for token in plain(sequence)]

    monkeypatch.setattr(causal_sampling, "_wanted_tokens", wanted)
    assert differences(monkeypatch) > 10


def test_a_stale_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values of a rejected token stay where those of the token in its place should be."""
    drafts: dict[int, Any] = {}
    accept, write = Engine._accept, KVStore.write

    def remember(self: Any, sequence: Any, scheduled: Any, sample: Any) -> None:
        table = self._scheduler.block_table(sequence.request_id)
        drafts[id(table)] = (sequence.verified, scheduled.start, scheduled.stop)
        accept(self, sequence, scheduled, sample)

    def stale(self: Any, table: Any, start: int, stop: int, fresh: Any, row: int, skip: int) -> None:
        encoded, begin, end = drafts.get(id(table), (None, 0, 0))
        if stop == start + 1 and begin <= start < end:
            fresh, row, skip = encoded.fresh, encoded.row, encoded.skip + start - begin
        write(self, table, start, stop, fresh, row, skip)

    monkeypatch.setattr(Engine, "_accept", remember)
    monkeypatch.setattr(KVStore, "write", stale)
    assert differences(monkeypatch) > 10


def test_pins_are_refused_by_name() -> None:
    request = random_request(0, random.Random(0))
    engine_run = replace(request, pinned=PinnedTokens(fixed={0: 5}))
    with pytest.raises(InputError, match='decode is "lossless"; only a canvas can hold pins'):
        run([replace(engine_run, params=replace(request.params, max_tokens=4))])
