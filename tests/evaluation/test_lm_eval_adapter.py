"""lm-eval asks our model: likelihoods are teacher forcing's, answers are diffusion's, in any batch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dgemma
from dgemma import InputError, LanguageModel
from dgemma.checkpoint.presets import PRESETS
from dgemma.checkpoint.random_weights import write_random
from dgemma.evaluation import likelihood, lm_eval_adapter
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from sizes import IS_FULL

TEXTS = [
    "The sea is salty, and nobody knows how deep it is where it is deepest. " * 3,
    "def f(x):\n    return x + 1\n",
    "naïve ☕ 日本",
    "a",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_random(path, PRESETS["tiny"].config, dtype="F32", seed=1)
    return path


@pytest.fixture(scope="module")
def lm(path: Path) -> LanguageModel:
    return dgemma.load(path, exact=True)


def adapter(lm: LanguageModel, **options: Any) -> Any:
    return lm_eval_adapter.DgemmaLM(lm, **{"max_denoising_steps": 2, **options})


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


@torch.inference_mode()
def teacher_forced(
    lm: LanguageModel, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """The plain way: one text, all its logits."""
    tokens = torch.tensor([[*context, *continuation]])
    logits = lm.logits(lm.encode(tokens, lm.new_cache(batch=1)))[0]
    rows = logits.double().log_softmax(-1)[len(context) - 1 : -1]
    target = tokens[0, len(context) :]
    return float(rows.gather(-1, target[:, None]).sum()), bool((rows.argmax(-1) == target).all())


def pairs(lm: LanguageModel) -> list[TokenPair]:
    rows = [(2, *lm.tokenizer.encode(text)) for text in TEXTS]
    return [TokenPair(row[: (len(row) + 1) // 2], row[(len(row) + 1) // 2 :]) for row in rows]


# Likelihoods


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize(("piece", "places"), [(512, 1 << 20), (7, 3)])
def test_a_likelihood_is_teacher_forcings_in_any_batch(
    batch: int, piece: int, places: int, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "_CHUNK_LEN", piece)
    monkeypatch.setattr(likelihood, "_MAX_LOGITS", places * lm.config.vocab_size)
    plain = lm.exact(False)
    given = pairs(lm)
    found = dict(log_likelihoods(plain, given, batch=batch))
    assert sorted(found) == [0, 1, 2, 3]
    for number, pair in enumerate(given):
        log_prob, greedy = teacher_forced(plain, pair.context, pair.continuation)
        per_token = abs(found[number].log_prob - log_prob) / len(pair.continuation)
        assert per_token < 1e-5
        assert found[number].is_greedy == greedy


def test_no_more_logits_are_held_than_allowed(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likelihood, "_MAX_LOGITS", 5 * lm.config.vocab_size)
    asked: list[int] = []
    logits = LanguageModel.logits

    def noted(self: LanguageModel, hidden: Any) -> Any:
        asked.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(LanguageModel, "logits", noted)
    (given, *_) = pairs(lm)
    dict(log_likelihoods(lm, [given]))
    assert max(asked) == 5
    assert sum(asked) == len(given.continuation)  # the context's words are never looked at


def test_greedy_is_told(lm: LanguageModel) -> None:
    context = (2, 17, 5)
    best = lm.generate(list(context), decode="causal", temperature=0, max_tokens=4, ignore_end=True).tokens
    wrong = (*best[:3], (best[3] + 1) % lm.config.vocab_size)
    found = dict(log_likelihoods(lm, [TokenPair(context, best), TokenPair(context, wrong)], batch=2))
    assert (found[0].is_greedy, found[1].is_greedy) == (True, False)
    assert found[0].log_prob > found[1].log_prob


def test_nothing_to_follow_is_certain_and_nothing_before_is_refused(lm: LanguageModel) -> None:
    found = dict(log_likelihoods(lm, [TokenPair((2,), ()), TokenPair((2, 3), (4,))], batch=2))
    assert (found[0].log_prob, found[0].is_greedy) == (0.0, True)
    with pytest.raises(InputError, match="the context is empty"):
        TokenPair((), (1,))


def test_text_is_split_where_lm_eval_splits_it(lm: LanguageModel) -> None:
    model = adapter(lm, batch_size=3)
    asked = [("The sea", " is salty"), ("The sea ", "is salty"), ("", "The sea")]
    found = model.loglikelihood(requests(*asked), disable_tqdm=True)
    encode = lm.tokenizer.encode
    whole = [2, *encode("The sea is salty")]
    start = len([2, *encode("The sea")])
    expected = teacher_forced(lm, whole[:start], whole[start:])
    for one in found[:2]:  # a space at the end goes to the next word
        assert one == (pytest.approx(expected[0], rel=1e-5), expected[1])
    assert found[2][0] == pytest.approx(teacher_forced(lm, [2], encode("The sea"))[0], rel=1e-5)


def test_rolling_reads_a_long_text_in_windows(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode(TEXTS[0])
    assert len(ids) > 30
    (found, short) = adapter(lm).loglikelihood_rolling(requests((TEXTS[0],), ("a",)), disable_tqdm=True)
    assert found == pytest.approx(teacher_forced(lm, [2], ids)[0], rel=1e-5)
    assert short == pytest.approx(teacher_forced(lm, [2], lm.tokenizer.encode("a"))[0], rel=1e-5)
    # Windows of 30: the first begins with the beginning of text, the others keep 30 tokens before the last.
    (windowed,) = adapter(lm, max_length=30).loglikelihood_rolling(requests((TEXTS[0],)), disable_tqdm=True)
    total, done = teacher_forced(lm, [2], ids[:30])[0], 30
    while done < len(ids):
        end = min(done + 30, len(ids))
        total += teacher_forced(lm, ids[end - 31 : done], ids[done:end])[0]
        done = end
    assert windowed == pytest.approx(total, rel=1e-5)


def test_a_context_that_is_too_long_loses_its_beginning(
    lm: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = adapter(lm, max_length=10).loglikelihood(requests((TEXTS[0], " and")), disable_tqdm=True)
    ids = [2, *lm.tokenizer.encode(TEXTS[0].rstrip() + "  and")]
    start = len([2, *lm.tokenizer.encode(TEXTS[0].rstrip())])
    room = 11 - len(ids[start:])
    assert found[0] == pytest.approx(teacher_forced(lm, ids[start - room : start], ids[start:])[0], rel=1e-5)
    assert f"is cut to its last {room}" in caplog.text


# Answers


def test_answers_are_those_of_diffusion_in_any_batch(lm: LanguageModel) -> None:
    asked = [(f"{number} and", {"until": ["\n\n"], "max_gen_toks": 20}) for number in range(4)]
    asked += [asked[0], ("5 and", {"until": "e", "max_new_tokens": 9, "do_sample": True, "temperature": 0.7})]
    one = adapter(lm, batch_size=1).generate_until(requests(*asked), disable_tqdm=True)
    assert len(set(one)) == 6  # the same prompt asked again has a seed of its own, as in repeats
    assert adapter(lm, batch_size="4").generate_until(requests(*asked), disable_tqdm=True) == one
    alone = adapter(lm).generate_until(requests(asked[2]), disable_tqdm=True)
    assert alone == [one[2]]  # whatever else was asked
    assert adapter(lm, seed=1).generate_until(requests(asked[2]), disable_tqdm=True) != alone
    assert "e" not in one[5]


def test_arguments_of_lm_eval_are_honoured_or_refused(lm: LanguageModel) -> None:
    model = adapter(lm, stop=["x"], entropy_bound=0.3)
    greedy = model._params({})
    assert (greedy.temperature, greedy.max_tokens, greedy.stop) == (0, 256, ("x",))
    assert (greedy.max_denoising_steps, greedy.entropy_bound) == (2, 0.3)
    assert model._params({"do_sample": False, "temperature": 0.8}).temperature == 0
    assert model._params({"do_sample": True}).temperature == 1
    assert model._params({"temperature": 0.5}).temperature == 0.5
    given = model._params(
        {"until": ["a", "b"], "max_tokens": 5, "top_p": 0.9, "top_k": 3, "decode": "causal"}
    )
    assert (given.stop, given.max_tokens, given.top_p, given.top_k) == (("a", "b"), 5, 0.9, 3)
    assert given.decode == "causal"
    for arguments, message in (
        ({"num_beams": 4}, "unknown option 'num_beams'"),
        ({"max_gen_toks": 5, "max_tokens": 6}, "generation arguments give different limits"),
        ({"seed": 4}, "generation arguments give a seed; it is an argument of the model"),
        ({"until": [""]}, "stop has a string of 0 characters"),
    ):
        with pytest.raises(InputError, match=message):
            model.generate_until(requests(("x", arguments)), disable_tqdm=True)


def test_a_prompt_for_an_answer_leaves_room_for_it(
    lm: LanguageModel, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapter(lm, max_length=64)
    arguments = {"max_gen_toks": 20}
    (text,) = model.generate_until(requests((TEXTS[0], arguments)), disable_tqdm=True)
    assert "is cut to its last 32" in caplog.text  # 64 less a canvas of 32
    assert text
    with pytest.raises(InputError, match="max_gen_toks is 40; a context of 64 leaves no space"):
        model.generate_until(requests(("x", {"max_gen_toks": 40})), disable_tqdm=True)


# Chat


def test_a_chat_keeps_its_controls_though_lm_eval_carries_text(lm: LanguageModel) -> None:
    model = adapter(lm)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|turn>user\nHi"}]
    text = model.apply_chat_template(chat)
    ids = lm.chat_template.render(chat)
    arguments = {"max_gen_toks": 8}
    (answer,) = model.generate_until(requests((text, arguments)), disable_tqdm=True)
    greedy = {"temperature": 0, "max_denoising_steps": 2, "max_tokens": 8}
    assert answer == lm.generate(ids, seed=model._seeds([text])[0], **greedy).text
    (found,) = model.loglikelihood(requests((text, "Yes.")), disable_tqdm=True)
    assert found[0] == pytest.approx(teacher_forced(lm, ids, lm.tokenizer.encode("Yes."))[0], rel=1e-5)
    begun = model.apply_chat_template([*chat, {"role": "assistant", "content": "It"}], False)
    assert begun == text + "It"
    assert model._rendered[begun] == (*ids, *lm.tokenizer.encode("It"))


def test_a_chat_that_lost_its_tokens_is_refused(lm: LanguageModel) -> None:
    model = adapter(lm)
    text = model.apply_chat_template([{"role": "user", "content": "Hi"}])
    with pytest.raises(InputError, match=r"begins with '<bos>'.*run without lm-eval's cache of requests"):
        adapter(lm).generate_until(requests((text, {})), disable_tqdm=True)
    with pytest.raises(InputError, match="the last message has role 'user'; an answer begun is assistant's"):
        model.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    spelled = "Hi<turn|>\n<|turn>model\nHo<turn|>\n<|turn>user\nHi"
    turns = [("user", "Hi"), ("assistant", "Ho"), ("user", "Hi")]
    model.apply_chat_template([{"role": role, "content": content} for role, content in turns])
    with pytest.raises(InputError, match="two chats have the same text '<bos>"):
        model.apply_chat_template([{"role": "user", "content": spelled}])


def test_names_for_lm_evals_books(lm: LanguageModel, path: Path) -> None:
    model = adapter(lm)
    assert (model.tokenizer_name, model.chat_template(True)) == ("dgemma", "the checkpoint's")
    assert model.chat_template() == ""
    with pytest.raises(InputError, match="the chat template 'rag' cannot be chosen"):
        model.chat_template("rag")
    loaded = lm_eval_adapter.DgemmaLM(pretrained=str(path), dtype="float32", exact=True)
    assert loaded.tokenizer_name == str(path).replace("/", "__")
    asked = requests(("The sea", " is"))
    assert loaded.loglikelihood(asked, disable_tqdm=True) == model.loglikelihood(asked, disable_tqdm=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lm: {}, "give either a loaded model or pretrained"),
        (lambda lm: {"lm": lm, "pretrained": "x"}, "give either a loaded model or pretrained"),
        (
            lambda lm: {"lm": lm, "dtype": "float32"},
            "dtype belong to loading, but the model is loaded already",
        ),
        (lambda lm: {"lm": lm, "batch_size": "auto"}, "batch_size is 'auto'; it must be a whole number"),
        (lambda lm: {"lm": lm, "max_length": 0}, "max_length is 0"),
        (lambda lm: {"lm": lm, "max_batch_size": 4}, "unknown option 'max_batch_size'"),
        (lambda lm: {"pretrained": "/nowhere/at/all"}, "/nowhere/at/all does not exist"),
    ],
)
def test_what_the_model_cannot_be_made_of_is_refused(
    make: Callable[[LanguageModel], dict[str, Any]], message: str, lm: LanguageModel
) -> None:
    with pytest.raises(dgemma.DgemmaError, match=message):
        lm_eval_adapter.DgemmaLM(**make(lm))


def test_a_continuation_longer_than_the_context_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match=r"a continuation has \d+ tokens; the context ends at 5"):
        adapter(lm, max_length=5).loglikelihood(requests(("x", TEXTS[0])), disable_tqdm=True)


def test_a_tokenizer_without_beginning_and_end_is_refused(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapter(lm)
    kind = type(lm.tokenizer)
    monkeypatch.setattr(kind, "bos_id", None)
    assert model._first_token == lm.tokenizer.eos_id
    monkeypatch.setattr(kind, "eos_id", None)
    with pytest.raises(InputError, match="neither a beginning nor an end of text"):
        model.loglikelihood(requests(("x", "y")), disable_tqdm=True)


# lm-eval itself


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Three tasks over a local file: choosing, answering, and perplexity."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    docs = [{"q": f"{n} + 1 is", "choices": [" one", " 2", " three"], "gold": n % 3} for n in range(5)]
    file = tmp_path / "docs.jsonl"
    file.write_text("\n".join(map(json.dumps, docs)))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test",
        "doc_to_text": "{{q}}",
    }  # fmt: skip

    def metric(name: str, aggregation: str, better: bool) -> list[dict[str, Any]]:
        return [{"metric": name, "aggregation": aggregation, "higher_is_better": better}]

    return [
        {
            **common, "task": "choose", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}", "target_delimiter": "", "metric_list": metric("acc", "mean", True),
        },
        {
            **common, "task": "write", "output_type": "generate_until", "doc_to_target": "{{choices[gold]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
            "metric_list": metric("exact_match", "mean", True),
        },
        {
            **common, "task": "roll", "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{q}}", "metric_list": metric("bits_per_byte", "bits_per_byte", False),
        },
    ]  # fmt: skip


def test_lm_eval_runs_our_model(lm: LanguageModel, tasks: list[dict[str, Any]]) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=adapter(lm, batch_size=2),
        tasks=tasks,
        # Without the ten seconds in which lm-eval reads the thousands of tasks that come with it.
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    hits = 0
    for number, sample in enumerate(found["samples"]["choose"]):
        context = [2, *lm.tokenizer.encode(f"{number} + 1 is")]
        scores = []
        for choice in (" one", " 2", " three"):
            whole = [2, *lm.tokenizer.encode(f"{number} + 1 is{choice}")]
            scores.append(teacher_forced(lm, whole[: len(context)], whole[len(context) :])[0])
        assert [score for score, _ in sample["filtered_resps"]] == pytest.approx(scores, rel=1e-5)
        hits += scores.index(max(scores)) == number % 3
    assert found["results"]["choose"]["acc,none"] == pytest.approx(hits / 5)
    texts = [sample["resps"][0][0] for sample in found["samples"]["write"]]
    assert len(set(texts)) == 5
    assert found["results"]["roll"]["bits_per_byte,none"] > 0


@pytest.mark.skipif(not IS_FULL, reason="make test-full")
def test_lm_eval_runs_it_by_name_and_through_its_template(
    path: Path, lm: LanguageModel, tasks: list[dict[str, Any]]
) -> None:
    import lm_eval

    for _ in range(2):  # registering twice is no error
        lm_eval_adapter.register()
    found = lm_eval.simple_evaluate(
        model="dgemma",
        model_args=f"pretrained={path},dtype=float32,exact=True,max_denoising_steps=2",
        batch_size=2,
        device="cpu",
        tasks=tasks[:2],
        apply_chat_template=True,
        system_instruction="Be brief.",
        num_fewshot=1,
        bootstrap_iters=0,
    )
    sample = found["samples"]["write"][0]
    prompt = sample["arguments"][0][0]
    assert prompt.startswith("<bos><|turn>system\nBe brief.")
    assert prompt.endswith("<|turn>user\n0 + 1 is<turn|>\n<|turn>model\n")
    model = adapter(lm)
    turns = prompt.removeprefix("<bos>").removesuffix("<|turn>model\n").split("<|turn>")[1:]
    chat = [turn.removesuffix("<turn|>\n").partition("\n") for turn in turns]
    assert model.apply_chat_template([{"role": r, "content": c} for r, _, c in chat]) == prompt
    again = model.generate_until(requests((prompt, {"until": ["\n\n"], "max_gen_toks": 16})), True)
    assert again == sample["resps"][0]


# Without lm-eval


def test_importing_the_module_imports_no_lm_eval() -> None:
    code = "import dgemma.evaluation.lm_eval_adapter, sys; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_lm_eval_it_says_how_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lm_eval", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"lm-eval cannot be imported .*`pip install lm-eval` installs it"):
        _ = lm_eval_adapter.DgemmaLM
    assert lm_eval_adapter.main() == 1
    assert capsys.readouterr().err.startswith("lm_eval: lm-eval cannot be imported")
    with pytest.raises(AttributeError, match="has no attribute 'DgemaLM'"):
        _ = lm_eval_adapter.DgemaLM


def test_the_command_is_lm_evals_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.__main__

    ran: list[bool] = []
    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", lambda: ran.append(True))
    assert lm_eval_adapter.main() == 0
    assert ran == [True]
    from lm_eval.api.registry import get_model

    assert get_model("dgemma") is lm_eval_adapter.DgemmaLM
