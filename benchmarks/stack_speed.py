"""Seconds of one denoise forward (no vocabulary): ours, exact, and the reference, in turn.

dgemma new --preset medium DIR
python -m benchmarks.stack_speed DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import DynamicCache

import dgemma
from benchmarks.record import write
from dgemma.bench.reference import load_reference
from dgemma.bench.timing import alternate, ratios, spread


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    plain = dgemma.load(args.model, dtype="bfloat16")
    exact = plain.exact()
    reference = load_reference(args.model, torch.bfloat16)
    vocab, canvas_len = plain.config.vocab_size, plain.config.canvas_len
    torch.manual_seed(0)
    findings = {}
    for rows in (1, 4, 8):
        prompt = torch.randint(vocab, (rows, args.context))
        canvas = torch.randint(vocab, (rows, canvas_len))
        soft = torch.randn(rows, canvas_len, plain.config.hidden_size, dtype=torch.bfloat16)
        plain_cache, exact_cache = plain.new_cache(rows), exact.new_cache(rows)
        plain.encode(prompt, plain_cache)
        exact.encode(prompt, exact_cache)
        past = DynamicCache(config=reference.config.text_config)
        reference.model.encoder(input_ids=prompt, past_key_values=past)
        decoder = reference.model.decoder
        seconds = alternate(
            {
                "dgemma": lambda: plain.denoise(canvas, plain_cache, soft),  # noqa: B023
                "dgemma exact": lambda: exact.denoise(canvas, exact_cache, soft),  # noqa: B023
                # Without self-conditioning logits: their softmax over the vocabulary is not the stack.
                "reference": lambda: decoder(decoder_input_ids=canvas, past_key_values=past),  # noqa: B023
                "dgemma encode": lambda: plain.encode(prompt, plain.new_cache(rows)),  # noqa: B023
                "dgemma exact encode": lambda: exact.encode(prompt, exact.new_cache(rows)),  # noqa: B023
            },
            args.rounds,
        )
        findings[f"{rows} rows"] = {
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "against dgemma": {k: v for k, v in ratios(seconds, "dgemma").items() if "encode" not in k},
            "exact encode against encode": ratios(seconds, "dgemma encode")["dgemma exact encode"],
        }
    write(
        "stack_speed",
        {
            "what": f"one denoise forward, canvas {canvas_len}, context {args.context}, bf16; "
            "encode of the whole context",
            "parameters": sum(p.numel() for p in plain.transformer.parameters()),
            "findings": findings,
        },
    )


if __name__ == "__main__":
    main()
