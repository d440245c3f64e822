"""Paths of training are those of generation; objectives that follow them reach a known optimum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch import Tensor

import dgemma
from dgemma.errors import InputError
from dgemma.language_model import LanguageModel
from dgemma.params import GenerationParams
from dgemma.sampling.sampler import make_sampler, open_canvas
from dgemma.sampling.vocab_scan import scale
from dgemma.training.data.canvases import CanvasSettings, TrainingBatch, make_batch
from dgemma.training.data.records import Span, TrainingExample
from dgemma.training.objective import encode, token_losses, with_settled_targets
from dgemma.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RolloutRecipe
from dgemma.training.reward import RolloutAnswer, backward, follow, load_reward, relative, rollout_answers
from dgemma.training.rollout import Path, roll_out, visited_states
from dgemma.training.trainer import Trainer
from oracle import CASES, make_oracle, make_ours, tokens

CASE = CASES[0]
PROMPT, CANVAS = 5, 8
SAMPLER = make_sampler(GenerationParams(max_denoising_steps=6, entropy_bound=1.0))


def model() -> LanguageModel:
    return make_ours(make_oracle(CASE))


def batch_of(lm: LanguageModel, *, rows: int = 3, visits: int = 4) -> TrainingBatch:
    ids = [tuple(tokens(CASE, 1, PROMPT + CANVAS, seed=row)[0].tolist()) for row in range(rows)]
    examples = [TrainingExample(row, (Span(PROMPT, len(row)),)) for row in ids]
    settings = CanvasSettings(canvas_len=CANVAS, vocab_size=lm.config.vocab_size, fill_token=1, visits=visits)
    return make_batch(examples, range(rows), settings)


def test_a_path_is_what_generation_writes_from_the_same_seed() -> None:
    lm = model()
    lm = lm.with_transformer(lm.transformer.with_lengths(canvas_len=CANVAS))
    prompt = tokens(CASE, 1, PROMPT, seed=3)
    options: dict[str, Any] = {"max_denoising_steps": 6, "entropy_bound": 1.0, "end_tokens": ()}
    for seed in range(5):
        batch = batch_of(lm, rows=1)
        batch.tokens[:, :PROMPT] = prompt
        _, context = encode(lm.transformer, batch)
        path = roll_out(lm.transformer, context, SAMPLER, [seed], canvas_len=CANVAS)
        answer = lm.generate(prompt[0].tolist(), seed=seed, max_tokens=CANVAS, **options)
        assert tuple(path.end.argmax[0].tolist()) == answer.tokens
        assert path.end.steps.tolist() == list(answer.steps)


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_visited_states_are_those_of_the_path(num_steps: int) -> None:
    lm = model()
    batch = batch_of(lm, rows=4)
    with torch.no_grad():
        _, context = encode(lm.transformer, batch)
    assert batch.seeds is not None
    seeds = batch.seeds.tolist()
    path = roll_out(lm.transformer, context, SAMPLER, seeds, canvas_len=CANVAS)
    picks = torch.tensor([[0.0, 0.999], [0.3, 0.6], [0.5, 0.5], [0.999, 0.2]])
    canvas, soft = visited_states(
        lm.transformer, context, SAMPLER, seeds, picks, canvas_len=CANVAS, num_steps=num_steps
    )
    for row, some in enumerate(picks.tolist()):
        count = min(int(path.end.steps[row]), num_steps)
        for state, pick in enumerate(some):
            visit, at = path.visits[int(pick * count)], 2 * row + state
            assert torch.equal(canvas[at], visit.canvas[row])
            expected = torch.zeros_like(soft[at]) if visit.soft is None else visit.soft[row]
            torch.testing.assert_close(soft[at], expected)


def test_only_accepted_draws_of_steps_with_a_successor_get_a_gradient() -> None:
    """Against the gradient of the whole sum, written out."""
    lm = model()
    stack = lm.transformer.requires_grad_(True)
    batch = batch_of(lm, rows=2)
    rewards = [1.0, 0.0, 0.5, 3.0, 1.0, 1.0]
    found = follow(stack, batch, SAMPLER, lambda path: rewards, samples=3, num_steps=5)
    backward(stack, found, num_paths=6)
    grads = {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad()
    total: Tensor = torch.zeros(())
    for number, visit in enumerate(found.path.visits):
        logits = stack.logits(stack.denoise(visit.canvas, found.context, visit.soft))
        log_probs = scale(logits, visit.temperature).log_softmax(-1)
        for row in range(6):
            if int(found.path.end.steps[row]) <= number + 1:
                continue
            for at in range(CANVAS):
                if visit.accepted[row, at]:
                    total = total - found.advantages[row] * log_probs[row, at, visit.drawn[row, at]] / 6
    total.backward()
    for name, parameter in stack.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_rewards_count_relative_to_their_group() -> None:
    found = relative(torch.tensor([1.0, 3.0, 5.0, 5.0]), samples=2)
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, 0.0, 0.0]))


def test_the_teachers_canvas_is_the_target() -> None:
    lm = model()
    batch = batch_of(lm)
    assert batch.seeds is not None
    targets = with_settled_targets(lm.transformer, batch, SAMPLER).clean
    with torch.no_grad():
        _, context = encode(lm.transformer, batch)
    path = roll_out(lm.transformer, context, SAMPLER, batch.seeds.tolist(), canvas_len=CANVAS)
    assert torch.equal(targets, path.end.argmax)
    assert not torch.equal(targets, batch.clean)


def recipe(out: FilePath, objective: Any, *, entropy_bound: float = 0.1, **rollout: Any) -> Recipe:
    ids = [tuple(tokens(CASE, 1, PROMPT, seed=row)[0].tolist()) + (7,) * CANVAS for row in range(4)]
    examples = [TrainingExample(row, (Span(PROMPT, len(row)),)) for row in ids]
    return Recipe(
        model="none",
        out=str(out),
        data=DataRecipe(records=examples, max_length=32),
        train="all",
        freeze=(),
        objective=objective,
        rollout=RolloutRecipe(
            sampling={"max_denoising_steps": 6, "end_tokens": (1,), "entropy_bound": entropy_bound}, **rollout
        ),
        optimizer=OptimizerRecipe(learning_rate=1e-2, betas=(0.9, 0.98), decay="constant"),
        precision="fp32",
        steps=40,
        batch=4,
    )


def share_of_sevens(answer: RolloutAnswer) -> float:
    return sum(token == 7 for token in answer.tokens) / len(answer.tokens)


def run(recipe: Recipe) -> tuple[LanguageModel, list[Any]]:
    from dgemma.training.report import read_log

    lm = model()
    trainer = Trainer(recipe, lm=lm.with_transformer(lm.transformer.with_lengths(canvas_len=CANVAS)))
    trainer.run()
    return trainer.lm, read_log(FilePath(recipe.out) / "log.jsonl")


def test_a_reward_is_learned_to_its_optimum(tmp_path: FilePath) -> None:
    """Of 96 tokens one is rewarded, everywhere: the best canvas is known."""
    asked = recipe(
        tmp_path / "run", "reward", entropy_bound=50.0, reward=share_of_sevens, samples=16, steps=3
    )
    _, log = run(asked)
    assert log[0].reward < 0.1
    assert log[-1].reward > 0.9
    assert log[-1].loss == -log[-1].reward


def test_distilling_settles_in_two_steps(tmp_path: FilePath) -> None:
    lm, log = run(recipe(tmp_path / "run", "distill", steps=2))
    assert log[-1].diffusion < 0.1 * log[0].diffusion
    prompt = tokens(CASE, 1, PROMPT, seed=0)[0].tolist()
    answer = lm.generate(prompt, seed=9, max_tokens=CANVAS, end_tokens=(), max_denoising_steps=6)
    assert answer.tokens == (7,) * CANVAS
    assert answer.steps == (2,)  # one to find it, one to see that it stays


def test_rewards_are_named_functions(tmp_path: FilePath) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def short(answer):\n    return -answer.steps\nnothing = 3\n")
    answer = RolloutAnswer(prompt="", text="", response="", tokens=(), expected=(), steps=4, settled=True)
    assert load_reward(f"{file}:short")(answer) == -4
    for wrong, why in (
        (f"{file}:long", "has no 'long'"), (f"{file}:nothing", "is not a function"),
        ("no_such_module:f", "cannot be imported: No module named"), ("short", "write module:name"),
        (":f", "write module:name"), (".mine:f", "write module:name"),
        (f"{tmp_path}/none.py:f", "is not a file"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"^rollout\.reward .*{why}") as caught:
            load_reward(wrong)
        assert caught.value.field == "rollout.reward"


def test_reward_and_objective_go_together(tmp_path: FilePath) -> None:
    for objective, reward in (("reward", None), ("distill", share_of_sevens)):
        with pytest.raises(InputError, match=r"rollout\.reward"):
            recipe(tmp_path, objective, reward=reward)


def test_answers_are_given_with_their_prompt_and_steps() -> None:
    lm = model()
    batch = batch_of(lm, rows=2)
    with torch.no_grad():
        _, context = encode(lm.transformer, batch)
    assert batch.seeds is not None
    path = roll_out(lm.transformer, context, SAMPLER, batch.seeds.tolist(), canvas_len=CANVAS)
    answers = rollout_answers(lm, batch, path, 1, 6)
    assert [answer.tokens for answer in answers] == [tuple(row) for row in path.end.argmax.tolist()]
    assert [answer.expected for answer in answers] == [tuple(row) for row in batch.clean.tolist()]
    assert [batch.context_tokens(row) for row in range(2)] == batch.tokens[:, :PROMPT].tolist()


def test_the_text_of_an_answer_ends_at_its_first_end_token() -> None:
    lm = dgemma.load("bundled:text")
    first, second = (lm.tokenizer.encode(text) for text in ("Yes", " No"))
    assert lm.generation_defaults.end_tokens == (1, 106)
    for end in (1, 106):
        canvas = torch.tensor([[*first, end, *second, 1, *second]])
        batch = replace(batch_of(lm, rows=1), clean=canvas)
        (answer,) = rollout_answers(lm, batch, Path(visits=(), end=open_canvas(canvas)), 1, 6)
        assert (answer.text, answer.response) == ("Yes", "Yes")
        assert answer.tokens == answer.expected == tuple(canvas[0].tolist())


def test_a_path_that_the_sampler_ends_has_not_settled(tmp_path: FilePath) -> None:
    """The recipe allows more steps than the sampler takes."""
    answers: list[RolloutAnswer] = []

    def judge(answer: RolloutAnswer) -> float:
        answers.append(answer)
        return 0.0

    asked = recipe(tmp_path / "run", "reward", reward=judge, steps=20)
    sampling = {"max_denoising_steps": 2, "confidence_threshold": 0.0, "end_tokens": (1,)}
    run(replace(asked, steps=1, rollout=replace(asked.rollout, sampling=sampling)))
    assert {(answer.steps, answer.settled) for answer in answers} == {(2, False)}


def test_the_loss_of_a_canvas_is_the_mean_over_its_states() -> None:
    lm = model()
    batch = batch_of(lm)
    assert batch.picks is not None
    picks = torch.rand(3, 2, generator=torch.Generator().manual_seed(0))
    both, first, second = (
        token_losses(lm.transformer, replace(batch, picks=some), sampler=SAMPLER).diffusion
        for some in (picks, picks[:, :1], picks[:, 1:])
    )
    torch.testing.assert_close(both, (first + second) / 2)


def test_losses_of_visited_states_can_be_repeated() -> None:
    lm = model()
    batch = batch_of(lm)
    first, second = (token_losses(lm.transformer, batch, sampler=SAMPLER).diffusion for _ in range(2))
    assert torch.equal(first, second)
