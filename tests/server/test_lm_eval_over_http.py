"""lm-eval asks a served model over its socket, with its own clients, and gets the figures it should."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dgemma
from dgemma import LanguageModel
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from dgemma.evaluation.lm_eval_adapter import DgemmaLM
from server.real_server import RealServer, serving, write_model
from sizes import IS_FULL

SEED = 1234  # lm-eval's clients send it with every request
QUESTIONS = [f"{number} + 1 is" for number in range(5)]
LIMITS: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 16}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def lm(model_path: Path) -> LanguageModel:
    return dgemma.load(model_path, exact=True)


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[RealServer]:
    with serving(str(model_path), "--exact") as server:
        yield server


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def task(path: Path, right: list[str], **arguments: Any) -> dict[str, Any]:
    """A task over a local file, for which these are the right answers."""
    docs = [{"q": question, "gold": gold} for question, gold in zip(QUESTIONS, right, strict=True)]
    path.write_text("\n".join(map(json.dumps, docs)))
    return {
        "task": "write",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{gold}}",
        "output_type": "generate_until",
        "generation_kwargs": {**LIMITS, **arguments},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def quick() -> dict[str, Any]:
    """Without the ten seconds in which lm-eval reads the thousands of tasks that come with it."""
    from lm_eval.tasks import TaskManager

    return {"task_manager": TaskManager(include_defaults=False), "bootstrap_iters": 0}


def evaluated(server: RealServer, kind: str, task: dict[str, Any], **options: Any) -> tuple[float, list[str]]:
    """lm-eval's figure and the answers it read, through one of its own clients."""
    import lm_eval

    path = {"local-completions": "completions", "local-chat-completions": "chat/completions"}[kind]
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": "tiny",
            "base_url": f"{server.address}/v1/{path}",
            "tokenizer_backend": None,
            "tokenized_requests": False,
            "max_retries": 1,
            **options,
        },
        tasks=[task],
        apply_chat_template=kind == "local-chat-completions",
        **quick(),
    )
    texts = [sample["resps"][0][0] for sample in found["samples"]["write"]]
    return float(found["results"]["write"]["exact_match,none"]), texts


def some_right(answers: list[str]) -> list[str]:
    """As if the model knew three of the five."""
    return [answer if number < 3 else "something else" for number, answer in enumerate(answers)]


@pytest.mark.skipif(not IS_FULL, reason="make test-full")
def test_completions_give_the_figure_of_the_answers_that_python_gives(
    server: RealServer, lm: LanguageModel, tmp_path: Path
) -> None:
    options: Any = {"max_tokens": 16, "stop": ("\n\n",), "temperature": 0.0, "seed": SEED}
    answers = [lm.generate(question, **options).text for question in QUESTIONS]
    asked = task(tmp_path / "docs.jsonl", some_right(answers))
    assert evaluated(server, "local-completions", asked) == (0.6, answers)


def test_chats_give_the_figure_of_the_answers_that_python_gives_many_at_once(
    server: RealServer, lm: LanguageModel, tmp_path: Path
) -> None:
    options: Any = {"max_tokens": 16, "stop": ("\n\n",), "temperature": 0.0, "seed": SEED}
    answers = [lm.chat(question, **options).text for question in QUESTIONS]
    asked = task(tmp_path / "docs.jsonl", some_right(answers))
    assert evaluated(server, "local-chat-completions", asked, num_concurrent=4) == (0.6, answers)


@pytest.mark.skipif(not IS_FULL, reason="make test-full")
def test_both_ways_into_lm_eval_give_one_figure(
    server: RealServer, lm: LanguageModel, tmp_path: Path
) -> None:
    """Words written left to right, each the likeliest, depend on no seed."""
    import lm_eval

    given = {"decode": "causal", "temperature": 0}
    unknown = task(tmp_path / "unknown.jsonl", ["?"] * 5, **given)
    _, answers = evaluated(server, "local-completions", unknown)
    asked = task(tmp_path / "docs.jsonl", some_right(answers), **given)
    direct = lm_eval.simple_evaluate(model=DgemmaLM(lm, batch_size=5), tasks=[asked], **quick())
    assert direct["results"]["write"]["exact_match,none"] == 0.6
    assert [sample["resps"][0][0] for sample in direct["samples"]["write"]] == answers
    assert evaluated(server, "local-completions", asked, batch_size=5) == (0.6, answers)


def test_likelihoods_are_those_that_python_computes(
    server: RealServer, lm: LanguageModel, model_path: Path
) -> None:
    """The client sends ids, one token to write, and reads the prompt's own log-probabilities."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        model="tiny", base_url=f"{server.address}/v1/completions", tokenizer=str(model_path), max_retries=1
    )
    texts = [("1 + 1 is", " 2"), ("1 + 1 is", " a number of some size"), ("Once", " upon a time")]
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=text, idx=number)
        for number, text in enumerate(texts)
    ]
    found = client.loglikelihood(asked)
    pairs = [TokenPair(*map(tuple, client._encode_pair(*text))) for text in texts]
    for number, likelihood in log_likelihoods(lm, pairs):
        log_prob, is_greedy = found[number]
        assert log_prob == pytest.approx(likelihood.log_prob, abs=1e-3)
        assert is_greedy == likelihood.is_greedy
