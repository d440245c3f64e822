"""The objective: who sees what, what is supervised, and that its gradients are those of its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgemma.model.kv_cache import AttentionContext, NewKeysValues
from dgemma.model.linear import PlainLinear
from dgemma.model.transformer import Head, Transformer
from dgemma.training import objective
from dgemma.training.data.canvases import CanvasSettings, TrainingBatch, make_batch
from dgemma.training.data.records import Span, TrainingExample
from dgemma.training.objective import cross_entropy, hidden_states, soft_embedding, token_losses
from oracle import CASES, Case, make_oracle, make_ours, tokens

CASE = CASES[0]
EVERY_EXPERT = CASES[5]  # a small step cannot flip a routing choice
PROMPT, REPLY = 11, 20
ROW_FIELDS = ("starts", "clean", "noisy", "weights", "noise")
EVERY_ROW = (torch.arange(3),)


def stack_of(case: Case) -> Transformer:
    return make_ours(make_oracle(case)).transformer


def batch_of(
    stack: Transformer,
    *,
    rows: int = 3,
    first: int = 0,
    encode_answers: bool = True,
    per_example: int = 1,
    shorter: int = 0,
    **packing: int,
) -> TrainingBatch:
    """shorter: every example is so many tokens shorter than the one before."""
    ends = [PROMPT + REPLY - shorter * row for row in range(rows)]
    ids = [tuple(tokens(CASE, 1, end, seed=row)[0].tolist()) for row, end in enumerate(ends)]
    examples = [TrainingExample(row, (Span(PROMPT, len(row)),)) for row in ids]
    settings = CanvasSettings(
        canvas_len=8,
        vocab_size=stack.config.vocab_size,
        fill_token=1,
        encode_answers=encode_answers,
        per_example=per_example,
        guesses=2,
        **packing,
    )
    return make_batch(examples, range(first, first + rows), settings)


def changed_from(batch: TrainingBatch, starts: Tensor) -> TrainingBatch:
    """The clean tokens at and behind each row's `starts` replaced by others."""
    at = torch.arange(batch.tokens.shape[1]) >= starts[:, None]
    return replace(batch, tokens=torch.where(at, (batch.tokens + 1) % 96, batch.tokens))


@torch.no_grad()
def denoised(stack: Transformer, batch: TrainingBatch) -> Tensor:
    return hidden_states(stack, batch, rows_at_once=64)[1]


def test_leaving_answers_unread_changes_nothing_of_the_diffusion_loss() -> None:
    """Where the encoder is not supervised it reads contexts only: same numbers, less work."""
    stack = stack_of(CASE)
    for first in range(0, 12, 3):
        whole = batch_of(stack, first=first)
        part = batch_of(stack, first=first, encode_answers=False)
        assert part.tokens.shape[1] == int(part.starts.max()) < whole.tokens.shape[1]
        losses = token_losses(stack, part)
        expected = token_losses(stack, whole).diffusion
        torch.testing.assert_close(losses.diffusion, expected, atol=1e-4, rtol=0)  # two guesses round
        assert losses.encoder.shape == part.encoder_weights.shape == (0,)


@pytest.mark.parametrize("encode_answers", [True, False])
def test_many_canvases_of_an_example_are_what_each_would_be_alone(encode_answers: bool) -> None:
    """Encoded once, the example gets the gradients of all of them."""
    stack = stack_of(EVERY_EXPERT)
    stack.requires_grad_(True)
    together = batch_of(stack, per_example=3, encode_answers=encode_answers)
    assert len(together.starts) == 3 * len(together.tokens)
    losses = token_losses(stack, together)
    losses.diffusion.sum().backward()
    found = {name: p.grad.clone() for name, p in stack.named_parameters() if p.grad is not None}
    stack.zero_grad()
    for number in range(3):
        part = {name: getattr(together, name)[number::3] for name in ROW_FIELDS}
        part["guessed"] = tuple((rows[rows % 3 == number] - number) // 3 for rows in together.guessed)
        alone = token_losses(stack, replace(together, **part))
        torch.testing.assert_close(losses.diffusion[number::3], alone.diffusion, atol=1e-4, rtol=0)
        alone.diffusion.sum().backward()
    for name, parameter in stack.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-4)


def leaks(stack: Transformer, batch: TrainingBatch) -> bool:
    return not torch.equal(denoised(stack, batch), denoised(stack, changed_from(batch, batch.starts)))


def test_the_denoiser_cannot_see_its_canvas_or_later_ones_in_clean_form() -> None:
    stack = stack_of(CASE)
    for first in range(0, 12, 3):
        assert not leaks(stack, batch_of(stack, first=first))


def test_the_denoiser_sees_every_canvas_before_its_own() -> None:
    stack = stack_of(CASE)
    for first in range(0, 12, 3):
        batch = batch_of(stack, first=first)
        other = denoised(stack, changed_from(batch, batch.starts - 1))
        differs = (denoised(stack, batch) != other).flatten(1).any(1)
        assert differs.all()


@pytest.mark.parametrize("ahead", [1, 8])
def test_the_leak_test_fails_if_the_context_reaches_into_the_canvas(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`>=` in place of `>`: one canvas too many, or a single token."""
    right = objective.context_before

    def too_far(stack: Transformer, fresh: NewKeysValues, starts: Tensor) -> AttentionContext:
        return right(stack, fresh, (starts + ahead).clamp(max=fresh.keys[0].shape[1]))

    stack = stack_of(CASE)
    monkeypatch.setattr(objective, "context_before", too_far)
    assert any(leaks(stack, batch_of(stack, first=first)) for first in range(0, 12, 3))


@torch.no_grad()
def test_the_encoder_predicts_each_token_from_those_before_it_only() -> None:
    stack = stack_of(CASE)
    batch = batch_of(stack, rows=1)
    encoded, _ = hidden_states(stack, batch, 64)
    for place in batch.encoder_places[batch.encoder_weights > 0].tolist():
        other, _ = hidden_states(stack, changed_from(batch, torch.tensor([place + 1])), 64)
        assert torch.equal(encoded[0, : place + 1], other[0, : place + 1])


@torch.no_grad()
def test_without_the_coin_the_denoiser_sees_exact_zeros() -> None:
    stack = stack_of(CASE)
    batch = batch_of(stack)
    off = replace(batch, guessed=())
    _, fresh = stack.encode(batch.tokens, objective.empty_context(stack, 3))
    plain = stack.denoise(batch.noisy, objective.context_before(stack, fresh, batch.starts))
    assert torch.equal(denoised(stack, off), plain)
    mixed = replace(batch, guessed=(torch.tensor([0, 2]),))
    same = (denoised(stack, mixed) == plain).flatten(1).all(1)
    assert same.tolist() == [False, True, False]


@torch.no_grad()
def test_a_guess_is_made_after_the_one_before_and_padding_changes_nothing() -> None:
    stack = stack_of(CASE)
    batch = batch_of(stack)
    _, fresh = stack.encode(batch.tokens, objective.empty_context(stack, 3))
    context = objective.context_before(stack, fresh, batch.starts)
    soft, expected = None, [torch.zeros(*batch.noisy.shape, stack.config.hidden_size)]
    for _ in range(3):
        soft = stack.soft_embedding(stack.logits(stack.denoise(batch.noisy, context, soft)))
        expected.append(soft)
    passes = (torch.tensor([0, 2]), torch.tensor([2, 2]), torch.tensor([2]))
    found = objective.guess(stack, replace(batch, guessed=passes), context, 64)
    for row, num_guesses in enumerate((1, 0, 3)):
        torch.testing.assert_close(found[row], expected[num_guesses][row], atol=1e-4, rtol=1e-4)


def total(stack: Transformer, batch: TrainingBatch) -> Tensor:
    found = token_losses(stack, batch)
    return found.diffusion.mean() + found.encoder.mean()


def check_gradient(stack: Transformer, name: str, loss: Callable[[], Tensor]) -> None:
    """Along the gradient itself, the loss must change by its norm."""
    parameter = stack.get_parameter(name)
    assert parameter.grad is not None, name
    expected = parameter.grad.norm().item()
    assert expected > 0, name
    step = 1e-4 * parameter.norm() * parameter.grad / expected
    with torch.no_grad():
        parameter += step
        up = loss()
        parameter -= 2 * step
        down = loss()
        parameter += step
    assert ((up - down) / (2 * step.norm())).item() == pytest.approx(expected, rel=0.03), name


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.experts.gate_up.weight",
        "layers.1.experts.down.weight",
        "layers.2.experts.gate_up.weight",
        "self_conditioning.mlp.gate.weight",
        "self_conditioning.mlp.down.weight",
        "self_conditioning.norm.weight",
        "layers.0.attention.key.weight",
        "layers.1.router.scores.weight",
        "embedding.weight",
    ],
)
def test_gradients_are_finite_differences_of_the_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = stack_of(EVERY_EXPERT)
    batch = replace(batch_of(stack), guessed=EVERY_ROW)
    # The first pass carries no gradient: held fixed, as the objective means it.
    _, fresh = stack.encode(batch.tokens, objective.empty_context(stack, 3))
    guess = objective.guess(stack, batch, objective.context_before(stack, fresh, batch.starts), 64)
    monkeypatch.setattr(objective, "guess", lambda *_: guess)
    stack.requires_grad_(True)
    total(stack, batch).backward()
    check_gradient(stack, name, lambda: total(stack, batch))


def test_self_conditioning_learns_only_where_the_coin_fell() -> None:
    stack = stack_of(CASE)
    stack.requires_grad_(True)
    batch = batch_of(stack)
    total(stack, replace(batch, guessed=())).backward()
    weight = stack.self_conditioning.mlp.down.weight
    assert weight.grad is None or weight.grad.abs().max() == 0
    total(stack, replace(batch, guessed=EVERY_ROW)).backward()
    assert weight.grad.abs().max() > 0


def test_the_denoisers_loss_reaches_the_encoders_keys_before_the_canvas_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack = stack_of(CASE)
    stack.requires_grad_(True)
    right = objective.context_before
    seen: list[NewKeysValues] = []

    def spy(stack: Transformer, fresh: NewKeysValues, starts: Tensor) -> AttentionContext:
        for tensor in (*fresh.keys, *fresh.values):
            tensor.retain_grad()
        seen.append(fresh)
        return right(stack, fresh, starts)

    monkeypatch.setattr(objective, "context_before", spy)
    batch = batch_of(stack)
    token_losses(stack, batch).diffusion.mean().backward()
    for tensor in (seen[0].keys[-1], seen[0].values[-1]):  # the last layer: nothing reads it but the canvas
        reached = tensor.grad.abs().amax((2, 3)) > 0
        before = torch.arange(reached.shape[1]) < batch.starts[:, None]
        assert torch.equal(reached, before)


def head_of(vocabulary: int, hidden: int, *, grad: bool = False) -> Head:
    matrix = PlainLinear(vocabulary, hidden, dtype=torch.float32, device=torch.device("cpu"))
    torch.manual_seed(0)
    torch.nn.init.normal_(matrix.weight, std=0.3)
    matrix.requires_grad_(grad)
    return Head(matrix, 30.0, hidden**0.5)


@pytest.mark.parametrize("rows", [1, 3, 7, 50])
def test_chunked_cross_entropy_equals_the_dense_one_and_its_gradients(rows: int) -> None:
    head = head_of(101, 16, grad=True)
    hidden = torch.randn(20, 16, requires_grad=True)
    targets = torch.randint(101, (20,))
    weights = torch.rand(20)
    dense = F.cross_entropy(head.logits(hidden), targets, reduction="none")
    expected = torch.autograd.grad((dense * weights).sum(), [hidden, head.embedding.weight])
    ours = cross_entropy(head, hidden, targets, rows)
    torch.testing.assert_close(ours, dense)
    found = torch.autograd.grad((ours * weights).sum(), [hidden, head.embedding.weight])
    torch.testing.assert_close(found, expected)


def test_the_soft_embedding_of_training_equals_inferences_on_plain_logits() -> None:
    lm = make_ours(make_oracle(CASE))
    hidden = torch.randn(9, lm.config.hidden_size)
    for rows in (2, 9):
        found = soft_embedding(lm.transformer.head, hidden, rows)
        torch.testing.assert_close(found, lm.soft_embedding(lm.logits(hidden)))


@pytest.mark.parametrize("encode_answers", [True, False])
def test_packed_examples_have_the_losses_and_gradients_of_single_rows(encode_answers: bool) -> None:
    """Also where examples have other lengths, rows end in padding, and a row is padding alone."""
    stack = stack_of(EVERY_EXPERT)
    stack.requires_grad_(True)
    batches = [
        batch_of(stack, rows=7, shorter=2, per_example=2, encode_answers=encode_answers, **packing)
        for packing in ({}, {"pack_to": 64, "pad_packed_to": 8, "pad_to": 16})
    ]
    assert batches[1].packing is not None
    assert batches[1].tokens.shape == (8, 64)
    assert int(batches[1].packing.segments.max()) > 0
    assert batches[1].packing.segments[-1].unique().tolist() == [-1]
    found = []
    for batch in batches:
        losses = token_losses(stack, batch)
        loss = (losses.diffusion * batch.weights).sum() + losses.encoder.sum()
        loss.backward()
        grads = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
        found.append((losses, grads))
        stack.zero_grad()
    (alone, alone_grads), (packed, packed_grads) = found
    torch.testing.assert_close(packed.diffusion, alone.diffusion, atol=1e-4, rtol=0)
    torch.testing.assert_close(packed.encoder, alone.encoder, atol=1e-5, rtol=0)
    for name, grad in alone_grads.items():
        torch.testing.assert_close(packed_grads[name], grad, atol=1e-3, rtol=1e-3)


def test_no_token_of_a_packed_row_reaches_another_example() -> None:
    stack = stack_of(CASE)
    batch = batch_of(stack, rows=7, shorter=2, pack_to=64)
    assert batch.packing is not None
    segments = batch.packing.segments
    first = segments == 0
    other = torch.where(first, batch.tokens, (batch.tokens + 1) % 96)
    with torch.no_grad():
        whole, changed = (
            hidden_states(stack, replace(batch, tokens=t), 64)[0] for t in (batch.tokens, other)
        )
    assert torch.equal(whole[first], changed[first])
    assert not torch.equal(whole[segments == 1], changed[segments == 1])
