"""Benchmark of a model here: diffusion, left to right and the reference, in turn, on the same weights.

Speed counts committed tokens, end to end, including the prompt. Where nothing else is said every canvas takes
exactly K steps and no end token ends an answer, so that the figures do not depend on the generated text.
Parts that do not fit into the time limit are left out, by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dgemma.bench.cost_model import (
    MachineRates,
    causal_s,
    encode_s,
    measure_rates,
    peak_flops,
    roofline_s,
    step_s,
)
from dgemma.bench.memory import peak_growth_bytes
from dgemma.bench.reference import TimedReference
from dgemma.bench.timing import spread
from dgemma.events import Answer, Commit
from dgemma.language_model import LanguageModel

# Asked as they are, or through the chat template where there is one.
PROMPTS = (
    "Explain in a few sentences how a file is opened and read.",
    "What does the kernel do when a page is not in memory?",
    "Write a short paragraph about the sea.",
    "List three options of a command that copies files, and what they do.",
)
_ROOFLINE_CANVASES = (1, 8)
_MOST_STEPS = 48  # of a canvas that does not settle


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    prompt_tokens: int = 256
    canvases: int = 2
    steps: int = 8  # K: denoising steps per canvas
    causal_tokens: int = 16
    rounds: int = 3
    lengths: tuple[int, ...] = (16, 64, 256, 1024)  # of replies, in tokens
    length_steps: tuple[int, ...] = (16, 8, 4)
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    time_limit_s: float = 600.0


Samples = dict[str, list[float]]
Found = dict[str, Any]


class ModelBench:
    """The parts of a benchmark, each a method that adds to `found` or to `skipped`."""

    def __init__(
        self,
        lm: LanguageModel,
        reference: TimedReference | None,
        plan: BenchPlan,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.lm, self.reference, self.plan, self._log = lm, reference, plan, log
        self._ends_at = time.monotonic() + plan.time_limit_s
        self._prompts = self._random_prompts()
        self._rates: MachineRates | None = None  # once they are measured
        self.skipped: list[str] = []
        self.found: Found = {
            "plan": asdict(plan),
            "dtype": str(lm.dtype).removeprefix("torch."),
            "device": str(lm.device),
            "exact": lm.transformer.execution.exact,
            "compiled": lm.transformer.execution.fused_vocabulary,
            "weight_bytes": sum(parameter.nbytes for parameter in lm.transformer.parameters()),
            "skipped": self.skipped,
        }

    def run(self) -> Found:
        # The longest one last: it takes what time is left.
        parts = (self.fixed, self.memory, self.roofline, self.real_prompts, self.throughput, self.lengths)
        for part in parts:
            part()
        self.found["verdict"] = verdict(self.found)
        return self.found

    # Fixed work: K steps a canvas, beside the reference

    def fixed(self) -> None:
        """Seconds per step, commit and causal token, alternating with the reference."""
        plan, ours, theirs = self.plan, Samples(), Samples()
        self._log("warming up")
        self._dgemma_round(next(self._prompts))
        if self.reference is not None and not self._probe_reference():
            self.reference = None
        for number in range(1, plan.rounds + 1):
            began, prompt = time.monotonic(), next(self._prompts)
            _add(ours, self._dgemma_round(prompt))
            if self.reference is not None:
                _add(theirs, _reference_round(self.reference, prompt, plan))
            self._log(f"round {number} of {plan.rounds}: {_short(ours, theirs)}")
            if number < plan.rounds and not self._fits("the other rounds", time.monotonic() - began):
                break
        self.found["rounds"] = number
        self.found["dgemma"] = {name: spread(values) for name, values in ours.items()}
        if theirs:
            self.found["reference"] = {name: spread(values) for name, values in theirs.items()}
            self.found["times_faster"] = {
                name: spread([_gain(name, a, b) for a, b in zip(ours[name], theirs[name], strict=True)])
                for name in theirs
            }

    def _dgemma_round(self, tokens: torch.Tensor) -> dict[str, float]:
        plan, prompt = self.plan, tokens[0].tolist()
        answer = self._diffuse(prompt, plan.canvases * self.lm.config.canvas_len, plan.steps)
        assert answer.steps == (plan.steps,) * plan.canvases
        assert answer.cached_tokens == 0
        figures = {
            "seconds_per_step": answer.timings.denoise_s / sum(answer.steps),
            "seconds_per_causal_token": self._causal_token_s(prompt),
            "tokens_per_second": answer.tokens_per_second,
            "seconds_to_first_text": answer.timings.first_commit_s,
            "seconds_per_canvas": answer.timings.total_s / plan.canvases,
        }
        if plan.canvases > 1:  # the last canvas is not committed
            figures["seconds_per_commit"] = answer.timings.commit_s / (plan.canvases - 1)
        return figures

    def _probe_reference(self) -> bool:
        """Its warm-up: one step of one canvas, twice, says whether a round fits into the time limit."""
        assert self.reference is not None
        for _ in range(2):  # the first call is slower than all later ones
            began = time.monotonic()
            self.reference.diffuse(next(self._prompts), 1, 1)
            round_s = (time.monotonic() - began) * self.plan.canvases * self.plan.steps
            if time.monotonic() + round_s <= self._ends_at:
                return True
        return self._fits("the reference", round_s)

    # The machine's own limit

    def roofline(self) -> None:
        """The share of a step that the products alone would take, at this machine's measured speed."""
        if self.lm.device.type != "cpu":
            self.skipped.append(f"the roofline: it is measured on a CPU, not on {self.lm.device}")
            return
        step_s_found = self.found["dgemma"]["seconds_per_step"]["median"]
        if not self._fits("the roofline", 20 * step_s_found):
            return
        self._log("measuring the machine: bandwidth, and products of the model's shapes")
        rates, config = measure_rates(self.lm.transformer, max_rows=1024), self.lm.config
        rows: Found = {}
        for canvases in _ROOFLINE_CANVASES:
            if not self._fits(f"the roofline of {canvases} canvases", 2 * canvases * step_s_found):
                continue
            # The speed of a shared machine changes: the better of its peaks before and after counts.
            before = peak_flops()
            answers = self._diffuse_all(canvases, config.canvas_len, 2)
            rates = replace(rates, peak_flops=max(before, peak_flops()))
            taken_s = answers[0].timings.denoise_s / 2
            rows[str(canvases)] = {
                "seconds_per_step": taken_s,
                "peak_gflops": rates.peak_flops / 1e9,
                "roofline_s": roofline_s(rates, config, canvases),
                "share_of_roofline": roofline_s(rates, config, canvases) / taken_s,
                "share_of_cost_model": step_s(rates, config, canvases, self.plan.prompt_tokens) / taken_s,
            }
        self._rates = rates
        self.found["roofline"] = {
            "peak_gflops": rates.peak_flops / 1e9,
            "read_gb_per_s": rates.bytes_per_s / 1e9,
            "canvases": rows,
        }

    # Replies by length, against left to right

    def lengths(self) -> None:
        """Seconds of replies of 16 to 1,024 tokens, by diffusion at K steps and left to right."""
        plan, config = self.plan, self.lm.config
        step_s_found = self.found["dgemma"]["seconds_per_step"]["median"]
        token_s = self.found["dgemma"]["seconds_per_causal_token"]["median"]
        longest = config.max_positions - plan.prompt_tokens
        self.skipped += [f"{n} tokens: the context leaves {longest}" for n in plan.lengths if n > longest]
        lengths = [n for n in plan.lengths if n <= longest]
        # Half of the time that is left is for the canvases.
        wanted = [n for n in lengths if self._fits(f"left to right, {n} tokens", 2 * n * token_s)]
        causal = self._causal_lengths(wanted) if wanted else {}
        rows = []
        for length in lengths:
            row: Found = {"tokens": length}
            for steps in plan.length_steps:
                forwards = -(-length // config.canvas_len) * steps
                name = f"diffuse_{steps}_s"
                if not self._fits(f"{steps} steps, {length} tokens", forwards * step_s_found):
                    continue
                row[name] = self._diffuse(next(self._prompts)[0].tolist(), length, steps).timings.total_s
                if self._rates is not None:
                    row[f"{name}_predicted"] = self._reply_s(self._rates, length, steps)
            rows.append(row)
            self._log(f"{length} tokens: " + ", ".join(_row_text(row)))
        # Once more after the canvases, as far as time is left: the better one counts, so that a slow moment
        # of the machine cannot make diffusion look fast.
        left_s = self._ends_at - time.monotonic()
        again = [n for n in causal if n * token_s <= left_s]
        if again:
            causal |= {n: min(causal[n], seconds) for n, seconds in self._causal_lengths(again).items()}
        for row in rows:
            self._compare(row, causal)
        self.found["lengths"] = rows

    def _compare(self, row: Found, causal: dict[int, float]) -> None:
        """Put left to right beside a reply of the same length by diffusion."""
        length = row["tokens"]
        if length not in causal:
            return
        row["causal_s"] = causal[length]
        if self._rates is not None:
            row["causal_s_predicted"] = self._causal_reply_s(self._rates, length)
        for steps in self.plan.length_steps:
            if f"diffuse_{steps}_s" in row:
                row[f"diffuse_{steps}_times_faster"] = causal[length] / row[f"diffuse_{steps}_s"]

    def _causal_lengths(self, lengths: list[int]) -> dict[int, float]:
        """Seconds to each of `lengths` tokens, from one reply."""
        began = time.perf_counter()
        events = self.lm.stream(
            next(self._prompts)[0].tolist(),
            decode="causal", max_tokens=max(lengths), temperature=0, ignore_end=True, seed=0,
        )  # fmt: skip
        times, count = {}, 0
        for event in events:
            if isinstance(event, Commit):
                count += len(event.tokens)
                times[count] = time.perf_counter() - began
        return {length: times[length] for length in lengths}

    def _reply_s(self, rates: MachineRates, length: int, steps: int) -> float:
        config, prompt = self.lm.config, self.plan.prompt_tokens
        canvases = -(-length // config.canvas_len)
        commits = (canvases - 1) * encode_s(rates, config, config.canvas_len, prompt)
        return (
            encode_s(rates, config, prompt, 0) + canvases * steps * step_s(rates, config, 1, prompt) + commits
        )

    def _causal_reply_s(self, rates: MachineRates, length: int) -> float:
        config, prompt = self.lm.config, self.plan.prompt_tokens
        return encode_s(rates, config, prompt, 0) + length * causal_s(rates, config, 1, prompt)

    # Several answers at once

    def throughput(self) -> None:
        """Tokens per second after the prompt, of 1 to 16 answers, by diffusion and left to right."""
        plan, config = self.plan, self.lm.config
        step_s_found = self.found["dgemma"]["seconds_per_step"]["median"]
        rows = []
        for count in plan.concurrency:
            if not self._fits(f"{count} answers at once", count * plan.steps * step_s_found):
                continue
            diffuse = self._diffuse_all(count, config.canvas_len, plan.steps)
            causal = self.lm.generate(
                [next(self._prompts)[0].tolist() for _ in range(count)],
                decode="causal", max_tokens=plan.causal_tokens, temperature=0, ignore_end=True, seed=0,
            )  # fmt: skip
            row = {
                "answers": count,
                "diffuse_tokens_per_second": _tokens_per_second(diffuse),
                "causal_tokens_per_second": _tokens_per_second(causal),
            }
            row["diffuse_times_faster"] = row["diffuse_tokens_per_second"] / row["causal_tokens_per_second"]
            rows.append(row)
            self._log(f"{count} at once: " + ", ".join(_row_text(row)))
        self.found["throughput"] = rows

    # What a person gets

    def real_prompts(self) -> None:
        """Adaptive steps on real prompts, by preset, and left to right for as many tokens."""
        if not self.lm.has_tokenizer:
            self.skipped.append("real prompts: the model has no tokenizer")
            return
        step_s_found = self.found["dgemma"]["seconds_per_step"]["median"]
        rows: Found = {}
        for preset in ("fast", "balanced", "thorough"):
            if not self._fits(f"real prompts, {preset}", _MOST_STEPS * len(PROMPTS) * step_s_found):
                continue
            answers = [
                self.lm.generate(prompt, max_tokens=self.lm.config.canvas_len, seed=1, preset=preset)
                for prompt in PROMPTS
            ]
            rows[preset] = _adaptive_row(answers)
            self._log(f"real prompts, {preset}: " + ", ".join(_row_text(rows[preset])))
        most = self.lm.config.canvas_len
        token_s = self.found["dgemma"]["seconds_per_causal_token"]["median"]
        if rows and self._fits("real prompts, left to right", most * len(PROMPTS) * token_s):
            answers = [
                self.lm.generate(prompt, max_tokens=most, seed=1, decode="causal") for prompt in PROMPTS
            ]
            rows["causal"] = _adaptive_row(answers)
        self.found["real_prompts"] = rows

    def memory(self) -> None:
        plan, config, peaks = self.plan, self.lm.config, Found()
        prompt = next(self._prompts)
        peaks["dgemma"] = peak_growth_bytes(
            lambda: self._diffuse(prompt[0].tolist(), plan.canvases * config.canvas_len, plan.steps),
            self.lm.device,
        )
        timed = self.reference
        if timed is not None:
            peaks["reference"] = peak_growth_bytes(
                lambda: timed.diffuse(prompt, plan.canvases, plan.steps), self.lm.device
            )
        self.found["peak_extra_bytes"] = peaks

    # Helpers

    def _diffuse(self, prompt: list[int], max_tokens: int, steps: int) -> Answer:
        (answer,) = self._ask([prompt], max_tokens, steps)
        return answer

    def _diffuse_all(self, count: int, max_tokens: int, steps: int) -> list[Answer]:
        return self._ask([next(self._prompts)[0].tolist() for _ in range(count)], max_tokens, steps)

    def _ask(self, prompts: list[list[int]], max_tokens: int, steps: int) -> list[Answer]:
        return self.lm.generate(
            prompts, max_tokens=max_tokens, max_denoising_steps=steps, confidence_threshold=0.0,
            ignore_end=True, seed=0,
        )  # fmt: skip

    def _causal_token_s(self, prompt: list[int]) -> float:
        """Seconds per token of greedy causal decoding; each token is a forward and a vocabulary scan."""
        # One token more: the first one comes from the forward of the prompt.
        num_tokens = self.plan.causal_tokens
        events = self.lm.stream(
            prompt, decode="causal", max_tokens=num_tokens + 1, temperature=0, ignore_end=True, seed=0
        )
        times = [time.perf_counter() for event in events if isinstance(event, Commit)]
        return (times[-1] - times[0]) / num_tokens

    def _random_prompts(self) -> Iterator[torch.Tensor]:
        """A new prompt each time [1, tokens]: the prefix cache holds earlier ones."""
        generator = torch.Generator().manual_seed(0)
        shape = (1, self.plan.prompt_tokens)
        while True:
            yield torch.randint(self.lm.config.vocab_size, shape, generator=generator)

    def _fits(self, part: str, seconds: float) -> bool:
        """Whether `seconds` are left; else the part is skipped, by name."""
        left_s = self._ends_at - time.monotonic()
        if seconds <= left_s:
            return True
        self.skipped.append(f"{part}: some {seconds:.0f} s, and {max(0.0, left_s):.0f} s are left")
        self._log(f"left out, {self.skipped[-1]}")
        return False


def verdict(found: Found) -> str:
    """In plain words: which is faster here, and whether to use diffusion on this machine at all."""
    rows = [row for row in found.get("lengths", ()) if "causal_s" in row]
    parts = []
    for steps in found["plan"]["length_steps"]:
        name = f"diffuse_{steps}_times_faster"
        gains = {row["tokens"]: row[name] for row in rows if name in row}
        if gains:
            said = ", ".join(f"{gain:.2g} times at {tokens}" for tokens, gain in gains.items())
            parts.append(f"with {steps} steps a canvas {said} tokens")
    if not parts:
        return "Too little was measured to say which is faster here; give more time (--time-limit)."
    faster = [
        (steps, row["tokens"])
        for steps in found["plan"]["length_steps"]
        for row in rows
        if row.get(f"diffuse_{steps}_times_faster", 0) > 1
    ]
    text = f"Speed of diffusion against left to right here: {'; '.join(parts)}. "
    if not faster:
        text += "Left to right is faster for every length: use --decode causal on this machine."
    else:
        most = max(steps for steps, _ in faster)
        least = min(tokens for steps, tokens in faster if steps == most)
        text += (
            f"Use diffusion from {least} tokens on if {most} steps a canvas are enough, else --decode causal."
        )
    many = [row for row in found.get("throughput", ()) if row["answers"] > 1]
    slower = [row["answers"] for row in many if row["diffuse_times_faster"] < 1]
    if many:
        k = found["plan"]["steps"]
        text += (
            f" With {k} steps, diffusion is faster at every measured concurrency."
            if not slower
            else f" With {k} steps, left to right is faster from {min(slower)} answers at once."
        )
    return text


def _adaptive_row(answers: list[Answer]) -> Found:
    tokens = sum(len(answer.tokens) for answer in answers)
    forwards = sum(answer.forwards for answer in answers)
    canvases = sum(len(answer.steps) for answer in answers)
    row: Found = {
        "tokens": tokens,
        "tokens_per_second": tokens / sum(answer.timings.total_s for answer in answers),
        "seconds_to_first_text": spread([answer.timings.first_commit_s for answer in answers]),
        "tokens_per_forward": tokens / forwards,
    }
    if canvases:
        row["steps_per_canvas"] = forwards / canvases
        row["steps_per_canvas_with_commit"] = forwards / canvases + 1
    return row


def _tokens_per_second(answers: list[Answer]) -> float:
    """Without the prompts: fewer tokens are written left to right, so that it ends within the time limit."""
    return sum(len(a.tokens) for a in answers) / max(a.timings.total_s - a.timings.prefill_s for a in answers)


def _reference_round(reference: TimedReference, prompt: torch.Tensor, plan: BenchPlan) -> dict[str, float]:
    times = reference.diffuse(prompt, plan.canvases, plan.steps)
    figures = {
        "seconds_per_step": times.step_s,
        "seconds_per_causal_token": reference.causal(prompt, plan.causal_tokens),
        "tokens_per_second": times.num_tokens / times.total_s,
    }
    if times.commit_s is not None:
        figures["seconds_per_commit"] = times.commit_s
    return figures


def _gain(name: str, ours: float, theirs: float) -> float:
    """The speedup over the reference: a ratio of seconds or, inverted, of speeds."""
    return ours / theirs if name == "tokens_per_second" else theirs / ours


def _short(ours: Samples, theirs: Samples) -> str:
    text = f"step {ours['seconds_per_step'][-1]:.3g} s, {ours['tokens_per_second'][-1]:.3g} tokens/s"
    if theirs:
        text += f"; reference {theirs['seconds_per_step'][-1]:.3g} s"
    return text


def _row_text(row: Found) -> list[str]:
    return [
        f"{name.replace('_', ' ')} {value:.3g}"
        for name, value in row.items()
        if isinstance(value, float) and not name.endswith("predicted")
    ]


def _add(samples: Samples, values: dict[str, float]) -> None:
    for name, value in values.items():
        samples.setdefault(name, []).append(value)
