"""Accelerators without having one: fake CUDA, one compiled graph, nothing read back in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dgemma.language_model import LanguageModel
from dgemma.model import linear
from dgemma.model.config import ModelConfig
from dgemma.model.execution import Execution
from dgemma.model.kv_cache import AttentionContext, KVCache, NewKeysValues
from dgemma.model.transformer import Transformer
from fake_cuda import DEVICE, FakeCuda
from oracle import FULL, SLIDING, Case, make_oracle, make_ours, tokens
from sizes import GRAPH_BACKEND, IS_FULL

ACCELERATOR = Execution()
# Every expert for every token: bf16 rounding cannot flip a routing choice. One layer of each kind.
CASE = Case(
    "two layers", {"top_k_experts": 8, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}, seed=6
)

# A read of a device value on the host, or a shape that depends on values: each stalls a device.
FORBIDDEN = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "unique_consecutive", "_unique2",
    "bincount", "equal", "is_nonzero", "repeat_interleave",
}  # fmt: skip


class RefuseReadBack(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool
            for arg in args
            if isinstance(arg, list | tuple)
            for i in arg
        )
        if name in FORBIDDEN or by_mask:
            raise AssertionError(f"{name} reads a value back or makes a data-dependent shape")
        return func(*args, **(kwargs or {}))


def bf16_model(execution: Execution) -> tuple[LanguageModel, AttentionContext, Tensor, Tensor]:
    lm = make_ours(make_oracle(CASE), dtype=torch.bfloat16, execution=execution)
    cache = lm.new_cache(batch=2)
    lm.encode(tokens(CASE, 2, 30, seed=1), cache, lengths=[30, 9])
    canvas = tokens(CASE, 2, 8, seed=2)
    soft = lm.soft_embedding(lm.logits(lm.denoise(canvas, cache)))
    return lm, cache.context(), canvas, soft


@torch.no_grad()
def test_a_denoise_forward_reads_nothing_back_in_its_accelerator_form() -> None:
    lm, context, canvas, soft = bf16_model(ACCELERATOR)
    with RefuseReadBack():
        lm.transformer.denoise(canvas, context)
        lm.transformer.soft_embedding(lm.transformer.logits(lm.transformer.denoise(canvas, context, soft)))


@torch.no_grad()
def test_the_read_back_test_can_fail() -> None:
    lm, context, canvas, _ = bf16_model(Execution(grouped_experts=False))
    with RefuseReadBack(), pytest.raises(AssertionError, match="reads a value back"):
        lm.transformer.denoise(canvas, context)
    with RefuseReadBack(), pytest.raises(AssertionError, match="data-dependent"):
        canvas[canvas > 3]


@torch.no_grad()
def test_both_passes_run_under_fake_cuda() -> None:
    config = make_ours(make_oracle(CASE)).config
    with FakeCuda():
        transformer = Transformer(config, dtype=torch.bfloat16, device=DEVICE, execution=ACCELERATOR)
        lm = LanguageModel(transformer)
        cache = KVCache(config, 3, dtype=torch.bfloat16, device=DEVICE)
        prompt = torch.zeros(3, 30, dtype=torch.long, device=DEVICE)
        hidden, fresh = transformer.encode(prompt, cache.context())
        cache.append(fresh, [30, 2, 11])
        canvas = torch.zeros(3, 8, dtype=torch.long, device=DEVICE)
        logits = lm.logits(lm.denoise(canvas, cache))
        again = lm.denoise(canvas, cache, soft=lm.soft_embedding(logits))
        for tensor in (hidden, logits, again):
            assert tensor.device.type == "cuda"
        assert again.shape == (3, 8, config.hidden_size)
        assert logits.shape == (3, 8, config.vocab_size)


@torch.no_grad()
def test_fake_cuda_catches_mixed_devices() -> None:
    config = make_ours(make_oracle(CASE)).config
    with FakeCuda():
        transformer = Transformer(config, dtype=torch.bfloat16, device=DEVICE, execution=ACCELERATOR)
        cache = KVCache(config, 1, dtype=torch.bfloat16, device=DEVICE)
        with pytest.raises(RuntimeError, match="device"):
            transformer.denoise(torch.zeros(1, 8, dtype=torch.long, device="cpu"), cache.context())


@torch.no_grad()
def test_released_geometry_runs_under_fake_cuda() -> None:
    """26 B parameters, 64 canvases in flight, a long context: shapes and devices hold."""
    from dgemma.checkpoint.presets import PRESETS

    config: ModelConfig = PRESETS["26b"].config
    rows, context_len = 64, 4096
    with FakeCuda():
        transformer = Transformer(config, dtype=torch.bfloat16, device=DEVICE, execution=ACCELERATOR)
        cache = KVCache(config, rows, dtype=torch.bfloat16, device=DEVICE, capacity=context_len)
        shapes = [(rows, context_len, s.num_kv_heads, s.head_dim) for s in config.layers]
        stores = tuple(torch.zeros(s, dtype=torch.bfloat16, device=DEVICE) for s in shapes)
        fresh = NewKeysValues(keys=stores, values=stores)
        cache.append(fresh, [context_len - row for row in range(rows)])
        canvas = torch.zeros(rows, config.canvas_len, dtype=torch.long, device=DEVICE)
        hidden = transformer.denoise(canvas, cache.context())
        assert hidden.shape == (rows, 256, 2816)
        # 210 MB of window per row at full size, and 20 KB per token of full context.
        per_row = cache.nbytes / rows
        assert per_row == pytest.approx(209.5e6 + context_len * 20480, rel=0.01)


@torch.no_grad()
def test_both_passes_compile_to_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "quantized_matmul", lambda: None)  # a graph has torch's own products
    lm, context, canvas, soft = bf16_model(ACCELERATOR)
    torch._dynamo.reset()
    denoise = torch.compile(lm.transformer.denoise, fullgraph=True, backend=GRAPH_BACKEND)
    assert torch.equal(denoise(canvas, context), lm.transformer.denoise(canvas, context))
    assert torch.equal(denoise(canvas, context, soft), lm.transformer.denoise(canvas, context, soft))
    encode = torch.compile(lm.transformer.encode, fullgraph=True, backend=GRAPH_BACKEND)
    hidden, fresh = encode(canvas, context)
    expected, expected_fresh = lm.transformer.encode(canvas, context)
    assert torch.equal(hidden, expected)
    assert torch.equal(fresh.keys[-1], expected_fresh.keys[-1])


@torch.no_grad()
def test_the_graph_test_can_fail() -> None:
    lm, context, canvas, _ = bf16_model(Execution(grouped_experts=False))  # this form does read back
    torch._dynamo.reset()
    denoise = torch.compile(lm.transformer.denoise, fullgraph=True, backend=GRAPH_BACKEND)
    with pytest.raises(Exception, match="data-dependent"):
        denoise(canvas, context)


@pytest.mark.skipif(not IS_FULL, reason="inductor compiles for a minute: make test-full")
@pytest.mark.filterwarnings("ignore")  # inductor's own deprecation warnings are not ours to fix
@torch.no_grad()
def test_inductor_rounds_no_worse_than_eager() -> None:
    """Fused kernels round bf16 at other places, so both are held against fp32."""
    lm, context, canvas, soft = bf16_model(ACCELERATOR)
    wide = make_ours(make_oracle(CASE))
    cache = wide.new_cache(batch=2)
    wide.encode(tokens(CASE, 2, 30, seed=1), cache, lengths=[30, 9])
    truth = wide.denoise(canvas, cache, soft.float())
    torch._dynamo.reset()
    denoise = torch.compile(lm.transformer.denoise, fullgraph=True)
    fused = (denoise(canvas, context, soft).float() - truth).abs().mean()
    eager = (lm.transformer.denoise(canvas, context, soft).float() - truth).abs().mean()
    assert 0 < fused <= 1.1 * eager
