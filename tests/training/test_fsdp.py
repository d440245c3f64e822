"""FSDP2 over two processes gives the losses, gradients and weights of one process with the whole batch.

Every layer is sharded by itself, the rest (embedding, self-conditioning, last norm) with the stack, as it
would be on many devices; here over gloo on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from importlib import resources
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from dgemma.loading import load
from dgemma.model.execution import Execution
from dgemma.model.lora import LoraSettings, attach
from dgemma.model.transformer import Transformer
from dgemma.training.data.canvases import CanvasSettings, TrainingBatch, make_batch
from dgemma.training.data.records import Span, TrainingExample
from dgemma.training.objective import context_before, empty_context, token_losses
from dgemma.training.optimizer import Optimizer, TrainedWeights
from dgemma.training.recipe import OptimizerRecipe
from dgemma.training.shards import divide
from rank_processes import run_processes, run_rank
from sizes import IS_FULL

pytestmark = pytest.mark.skipif(
    not dist.is_available() or sys.platform == "win32", reason="torch has no gloo here"
)
WORLD, ROWS = 2, 4
LIMIT = 1e-5  # of the gradient's size, in fp32
Objective = Callable[[Transformer, TrainingBatch], Tensor]


def batch_of(rows: range) -> TrainingBatch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(256, (ROWS, 40), generator=generator).tolist()
    examples = [TrainingExample(tuple(ids[row]), (Span(9, 40),)) for row in rows]
    return make_batch(examples, list(rows), CanvasSettings(canvas_len=16, vocab_size=256, fill_token=1))


def training_loss(stack: Transformer, batch: TrainingBatch) -> Tensor:
    losses = token_losses(stack, batch)
    return losses.diffusion.mean() + losses.encoder.mean()


def unrolled_loss(stack: Transformer, batch: TrainingBatch) -> Tensor:
    """Three steps with gradients along the soft embeddings: the embedding is read between forwards too."""
    _, fresh = stack.encode(batch.tokens, empty_context(stack, len(batch.starts)))
    context = context_before(stack, fresh, batch.starts)
    logits = stack.logits(stack.denoise(batch.noisy, context))
    for _ in range(2):
        logits = stack.logits(stack.denoise(batch.noisy, context, stack.soft_embedding(logits)))
    return F.cross_entropy(logits.flatten(0, 1), batch.clean.flatten())


# The two processes


def golden_stack() -> Transformer:
    with resources.as_file(resources.files("dgemma") / "data" / "golden" / "checkpoint") as path:
        return load(path, dtype="float32").transformer


def all_trained(execution: Execution | None = None) -> Transformer:
    stack = golden_stack().requires_grad_(True)
    return stack if execution is None else stack.with_execution(execution)


def adapter_trained() -> Transformer:
    stack = attach(golden_stack(), LoraSettings(rank=4, expert_rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, factor in stack.named_parameters():
            if name.endswith(".up"):  # zeros would hide `down` from the gradients
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    return stack


def trained(stack: Transformer) -> dict[str, nn.Parameter]:
    return {name: p for name, p in stack.named_parameters() if p.requires_grad}


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def compare(stack: Transformer, mesh: DeviceMesh, objective: Objective = training_loss) -> dict[str, Any]:
    """Whole batch in one piece, then its half in a sharded twin, twice: a second step must be as good."""
    whole = objective(stack, batch_of(range(ROWS)))
    whole.backward()
    expected = {name: p.grad.clone() for name, p in trained(stack).items() if p.grad is not None}
    stack.zero_grad()
    divide(stack, mesh)
    share, rank = ROWS // WORLD, mesh.get_rank()
    mine = batch_of(range(rank * share, (rank + 1) * share))
    found: dict[str, Any] = {"gradients": len(expected), "loss": [], "own_loss": [], "gradient": []}
    for _ in range(2):
        loss = objective(stack, mine)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found["own_loss"].append(abs(float(loss.detach() - whole.detach())))
        found["loss"].append(abs(float(mean / WORLD - whole.detach())) / float(whole.detach()))
        gradients = {name: p.grad.full_tensor() for name, p in trained(stack).items() if p.grad is not None}
        assert gradients.keys() == expected.keys()
        found["gradient"] += [distance(gradients[name], expected[name]) for name in expected]
        stack.zero_grad()
        with torch.no_grad():  # a look at held-out data between steps
            objective(stack, mine)
    return found


def compare_steps(mesh: DeviceMesh) -> dict[str, Any]:
    """Two steps of the trainer's own optimizer, moments and clipping included."""
    # A large eps: where a gradient is nearly zero, Adam makes a step of whatever rounding leaves.
    recipe = OptimizerRecipe(eps=1e-2)

    def train(stack: Transformer, batch: TrainingBatch) -> tuple[dict[str, nn.Parameter], list[float]]:
        weights = TrainedWeights(trained(stack))
        optimizer = Optimizer(weights, recipe)
        norms = []
        for _ in range(2):
            training_loss(stack, batch).backward()
            weights.collect_gradients()
            norms.append(optimizer.step(1e-2))
        return weights.parameters, norms

    one = all_trained()
    two = deepcopy(one)
    before = {name: p.detach().clone() for name, p in trained(one).items()}
    expected, expected_norms = train(one, batch_of(range(ROWS)))
    divide(two, mesh)
    share, rank = ROWS // WORLD, mesh.get_rank()
    found, norms = train(two, batch_of(range(rank * share, (rank + 1) * share)))
    with torch.no_grad():
        changes = [
            distance(found[name].full_tensor() - before[name], expected[name] - before[name])
            for name in before
        ]
    return {"norms": norms, "expected_norms": expected_norms, "changes": changes}


def rank(mesh: DeviceMesh) -> dict[str, Any]:
    small = Execution(expert_block=8, explicit_attention=True, recompute_layers=True)
    found = {
        "all, as small models train": compare(all_trained(small), mesh),
        "an adapter": compare(adapter_trained(), mesh),
        "optimizer": compare_steps(mesh),
    }
    if IS_FULL:
        found["all"] = compare(all_trained(), mesh)
        found["all, three steps unrolled"] = compare(all_trained(), mesh, unrolled_loss)
    return found


# The tests


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both processes found."""
    return run_processes(__file__, WORLD, tmp_path_factory.mktemp("fsdp"))


CASES = ["all, as small models train", "an adapter"]
if IS_FULL:
    CASES += ["all", "all, three steps unrolled"]


@pytest.mark.parametrize("case", CASES)
def test_sharded_losses_and_gradients_are_those_of_one_process(
    case: str, results: list[dict[str, Any]]
) -> None:
    for found in (result[case] for result in results):
        assert found["gradients"] > 50
        assert max(found["loss"]) < LIMIT
        assert len(found["gradient"]) == 2 * found["gradients"]
        assert max(found["gradient"]) < LIMIT


@pytest.mark.parametrize("case", CASES)
def test_neither_process_could_have_found_them_alone(case: str, results: list[dict[str, Any]]) -> None:
    """Each half has another loss than the whole: without the sharing of gradients the test above fails."""
    assert all(min(result[case]["own_loss"]) > 1e-2 for result in results)


def test_the_trainers_optimizer_makes_the_same_steps_on_shards(results: list[dict[str, Any]]) -> None:
    for found in (result["optimizer"] for result in results):
        assert found["norms"] == pytest.approx(found["expected_norms"], rel=LIMIT)
        assert max(found["norms"]) > 1  # clipping is at work
        assert max(found["changes"]) < 1e-3


if __name__ == "__main__":
    run_rank(rank)
