"""Run a case with Hugging Face Transformers: `python run_transformers.py CASE`. Imports nothing of dgemma."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers: Any = importlib.import_module("transformers")
generation: Any = importlib.import_module("transformers.models.diffusion_gemma.generation_diffusion_gemma")
Tensors = dict[str, Tensor]


def load(case: Path) -> Any:
    transformers.utils.logging.set_verbosity_error()  # the vision tower has no weights, and is not used
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.DiffusionGemmaForBlockDiffusion
    return kind.from_pretrained(case / "checkpoint", dtype=torch.float32).eval()


@torch.inference_mode()
def run(model: Any, inputs: Tensors, plan: dict[str, Any]) -> Tensors:
    found: Tensors = {}
    for length in plan["contexts"]:
        given = {name: inputs[f"{length}/{name}"][None] for name in ("prompt", "canvas", "second", "commit")}
        past = transformers.DynamicCache(config=model.config.text_config)
        with hidden(model, found, encoder=f"{length}/prompt", decoder=f"{length}/canvas"):
            out = model(input_ids=given["prompt"], decoder_input_ids=given["canvas"], past_key_values=past)
        found[f"{length}/prompt/logits"] = causal_logits(model, out.encoder_last_hidden_state)
        found[f"{length}/canvas/logits"] = out.logits[0]
        with hidden(model, found, decoder=f"{length}/conditioned"):
            out = model(
                decoder_input_ids=given["second"],
                past_key_values=past,
                self_conditioning_logits=inputs[f"{length}/previous"][None],
            )
        found[f"{length}/conditioned/logits"] = out.logits[0]
        with hidden(model, found, encoder=f"{length}/commit", decoder=f"{length}/next"):
            out = model(input_ids=given["commit"], decoder_input_ids=given["canvas"], past_key_values=past)
        found[f"{length}/commit/logits"] = causal_logits(model, out.encoder_last_hidden_state)
        found[f"{length}/next/logits"] = out.logits[0]
    found |= run_step(model, inputs, plan)
    return found | run_generation(model, inputs, plan)


def causal_logits(model: Any, states: Tensor) -> Tensor:
    cap = model.final_logit_softcapping
    logits: Tensor = torch.tanh(model.lm_head(states).float() / cap) * cap
    return logits[0]


@contextmanager
def hidden(model: Any, found: Tensors, encoder: str = "", decoder: str = "") -> Iterator[None]:
    handles = []
    for prefix, layers in (
        (encoder, model.model.encoder.language_model.layers),
        (decoder, model.model.decoder.layers),
    ):
        for number, layer in enumerate(layers if prefix else ()):

            def keep(module: Any, args: Any, out: Any, name: str = f"{prefix}/hidden.{number}") -> None:
                found[name] = (out[0] if isinstance(out, tuple) else out)[0].clone()

            handles.append(layer.register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_step(model: Any, inputs: Tensors, plan: dict[str, Any]) -> Tensors:
    """The schedule, the acceptance and the renoising of one step, on given logits and draws."""
    options = plan["generation"]
    schedule = generation.LinearTemperatureScheduleLogitsProcessor(
        t_min=options["t_min"], t_max=options["t_max"], max_denoising_steps=options["max_denoising_steps"]
    )
    count = torch.tensor(options["max_denoising_steps"], dtype=torch.int32)
    logits = schedule(None, inputs["step/logits"][None], cur_step=count)
    sampler = generation.EntropyBoundSampler(
        generation.EntropyBoundSamplerConfig(entropy_bound=options["entropy_bound"]),
        **sampler_facts(model),
        max_denoising_steps=options["max_denoising_steps"],
    )
    with mock.patch("torch.randint", return_value=inputs["step/noise"][None].clone()):
        accepted = sampler.accept_canvas(
            inputs["step/before"][None], inputs["step/drawn"][None], logits, count
        )
        canvas = sampler.renoise_canvas(accepted.clone(), count)
    return {"step/argmax": logits.argmax(-1)[0], "step/canvas": canvas[0]}


def sampler_facts(model: Any) -> dict[str, Any]:
    return {"canvas_length": model.config.canvas_length, "vocab_size": model.config.text_config.vocab_size}


def run_generation(model: Any, inputs: Tensors, plan: dict[str, Any]) -> Tensors:
    """`generate`, whose draws are replaced by the recorded ones; it asks for them in this order."""
    found: Tensors = {}
    names = [name for name in inputs if name.startswith(("generation/open.", "generation/noise."))]
    noises = iter(sorted(names, key=draw_order))
    draws = iter(sorted((n for n in inputs if n.startswith("generation/drawn.")), key=draw_order))

    def randint(*args: Any, **kwargs: Any) -> Tensor:
        return inputs[next(noises)][None].clone()

    def multinomial(probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = next(draws)
        found[name.replace("drawn", "argmax")] = probs.argmax(-1)
        return inputs[name][:, None].clone()

    options = dict(plan["generation"])
    config = generation.EntropyBoundSamplerConfig(entropy_bound=options.pop("entropy_bound"))
    prompt = inputs["generation/prompt"][None]
    try:
        with mock.patch("torch.randint", randint), mock.patch("torch.multinomial", multinomial):
            out = model.generate(
                input_ids=prompt,
                max_new_tokens=plan["canvases"] * model.config.canvas_length,
                eos_token_id=None,
                sampler_config=config,
                **options,
            )
        found["generation/tokens"] = out.sequences[0, prompt.shape[1] :]
    except StopIteration:  # it takes more steps than the reference: what there is says where it parted
        pass
    return found


def draw_order(name: str) -> tuple[int, int]:
    """The first noise of a canvas comes before that of its steps."""
    kind, *numbers = name.removeprefix("generation/").split(".")
    return int(numbers[0]), -1 if kind == "open" else int(numbers[1])


def main() -> None:
    case = Path(sys.argv[1])
    found = run(
        load(case), load_file(case / "inputs.safetensors"), json.loads((case / "plan.json").read_text())
    )
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, case / "outputs.safetensors")


if __name__ == "__main__":
    main()
