"""The model class for `lm-eval`. It imports lm-eval; use it through `lm_eval_adapter`, which does not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgemma.errors import InputError
from dgemma.evaluation.likelihood import TokenPair, log_likelihoods
from dgemma.evaluation.lm_eval_adapter import import_lm_eval
from dgemma.evaluation.results import seed_of
from dgemma.language_model import LanguageModel
from dgemma.loading import load
from dgemma.params import GenerationParams

_BASE: Any = import_lm_eval("lm_eval.api.model").LM
_UTILS: Any = import_lm_eval("lm_eval.utils")
_LOG = logging.getLogger(__name__)

_LOAD_OPTIONS = ("dtype", "device", "adapter", "exact", "compile", "revision")
_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DEFAULT_MAX_TOKENS = 256  # lm-eval's own


class DgemmaLM(_BASE):  # type: ignore[misc]
    """A dgemma model for lm-eval's interface.

    `loglikelihood` and `loglikelihood_rolling` are teacher-forced log-likelihoods of the causal pass, not
    of diffusion. `generate_until` generates by diffusion (or by the mode of `decode`).

    lm, or pretrained (a directory or hub name) with dtype, device, adapter, exact, compile, revision as in
    `dgemma.load`. batch_size: rows per batch. max_length: a context shorter than the model's. seed: each
    request's seed is derived from it and the request. options: generation options; a task's override them.
    """

    def __init__(
        self,
        lm: LanguageModel | None = None,
        *,
        pretrained: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        loading = {name: options.pop(name) for name in _LOAD_OPTIONS if name in options}
        GenerationParams.make(**options)
        if (lm is None) == (pretrained is None):
            raise InputError("give either a loaded model or pretrained, a directory or hub name.")
        if lm is not None and loading:
            raise InputError(f"{', '.join(loading)} belong to loading, but the model is loaded already.")
        self._batch = _positive_integer("batch_size", batch_size)
        self._lm = load(str(pretrained), **loading) if lm is None else lm
        self._name = "dgemma" if pretrained is None else str(pretrained)
        self._seed, self._options = seed, options
        longest = self._lm.config.max_positions
        self._max_length = (
            longest if max_length is None else min(longest, _positive_integer("max_length", max_length))
        )
        self._rendered: dict[str, tuple[int, ...]] = {}  # prompts of the chat template, by their text
        self._device = self._lm.device

    # Likelihoods

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each (context, continuation), and whether greedy decoding would give it."""
        pairs = [self._token_pair(*request.args) for request in requests]
        found = self._log_likelihoods(pairs, disable_tqdm)
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text; longer texts in windows of `max_length`."""
        windows: list[TokenPair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            for pair in _UTILS.get_rolling_token_windows(
                token_list=self._lm.tokenizer.encode(request.args[0]),
                prefix_token=self._first_token,
                max_seq_len=self._max_length,
                context_len=1,
            ):
                context, continuation = _UTILS.make_disjoint_window(pair)
                windows.append(TokenPair(tuple(context), tuple(continuation)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._log_likelihoods(windows, disable_tqdm), strict=True):
            totals[owner] += log_prob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _log_likelihoods(self, pairs: Sequence[TokenPair], quiet: bool) -> list[tuple[float, bool]]:
        running = log_likelihoods(self._lm, pairs, batch=self._batch)
        found = dict(_bar(running, len(pairs), "log-likelihoods", quiet))
        return [(found[n].log_prob, found[n].is_greedy) for n in range(len(pairs))]

    def _token_pair(self, context: str, continuation: str) -> TokenPair:
        if context in self._rendered:
            ids = self._rendered[context]
            return self._truncated(ids, tuple(self._lm.tokenizer.encode(continuation)))
        # Spaces at the end belong to the next token.
        bare = context.rstrip()
        whole, start = self._text_ids(context + continuation), self._text_ids(bare)
        return self._truncated(whole[: len(start)], whole[len(start) :])

    def _truncated(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> TokenPair:
        """The pair with its context truncated at the beginning, as in lm-eval's other models."""
        max_len = self._max_length + 1 - len(continuation)
        if max_len < 1:
            raise InputError(
                f"a continuation has {len(continuation)} tokens; the context ends at {self._max_length}."
            )
        return TokenPair(_last(context, max_len), continuation)

    # Generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generated texts. A generation argument that is not supported is refused by its name."""
        groups: dict[str, tuple[GenerationParams, list[int]]] = {}
        for number, request in enumerate(requests):
            params = self._params(request.args[1])
            groups.setdefault(repr(params), (params, []))[1].append(number)
        seeds = self._seeds([str(request.args[0]) for request in requests])
        texts: dict[int, str] = {}
        batches = [
            (params, numbers[begin : begin + self._batch])
            for params, numbers in groups.values()
            for begin in range(0, len(numbers), self._batch)
        ]
        for params, numbers in _bar(iter(batches), len(batches), "answers", disable_tqdm):
            prompts = [self._prompt(requests[n].args[0], params.max_tokens or 0) for n in numbers]
            options = {name: value for name, value in vars(params).items() if name != "seed"}
            answers = self._lm.generate(prompts, seeds=[seeds[n] for n in numbers], **options)
            for number, answer in zip(numbers, answers, strict=True):
                texts[number] = answer.text
                self.cache_hook.add_partial("generate_until", requests[number].args, answer.text)
        return [texts[number] for number in range(len(requests))]

    def _params(self, arguments: Mapping[str, Any]) -> GenerationParams:
        """Translate lm-eval's arguments. Without do_sample and temperature, lm-eval means greedy decoding."""
        left = dict(arguments)
        limits = {name: left.pop(name) for name in _MAX_TOKENS_NAMES if left.get(name) is not None}
        if len(set(limits.values())) > 1:
            raise InputError(f"generation arguments give different limits: {limits}; give one.")
        if "seed" in left:
            raise InputError(
                "generation arguments give a seed; it is an argument of the model. Move it there.",
                field="seed",
            )
        until = left.pop("until", None) or ()
        sample = left.pop("do_sample", None)
        options = {"max_tokens": _DEFAULT_MAX_TOKENS, **self._options, **left}
        for value in limits.values():
            options["max_tokens"] = value
        if sample is False or (sample is None and "temperature" not in options):
            options["temperature"] = 0
        if until:
            options["stop"] = (until,) if isinstance(until, str) else tuple(until)
        return GenerationParams.make(self._lm.generation_defaults, **options)

    def _seeds(self, contexts: Sequence[str]) -> list[int]:
        """Seeds by prompt and the number of its earlier occurrences, independent of the batch."""
        seen: Counter[str] = Counter()
        seeds = []
        for context in contexts:
            seeds.append(seed_of(self._seed, seen[context], context))
            seen[context] += 1
        return seeds

    def _prompt(self, context: str, max_tokens: int) -> tuple[int, ...]:
        canvas_len = self._lm.config.canvas_len
        max_len = self._max_length - -(-max_tokens // canvas_len) * canvas_len
        if max_len < 1:
            raise InputError.about(
                "max_gen_toks",
                f"is {max_tokens}; a context of {self._max_length} leaves no space for a prompt.",
            )
        return _last(self._rendered.get(context) or self._text_ids(context), max_len)

    # Chat

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt as text, which lm-eval passes back later.

        Encoding text never gives control tokens, so the tokens of a rendered prompt are stored by its text.
        """
        messages = [dict(message) for message in chat_history]
        started: list[int] = []
        if not add_generation_prompt:  # the last message is the beginning of the answer
            last = messages.pop()
            if last["role"] != "assistant":
                raise InputError(
                    f"the last message has role {last['role']!r}; an answer begun is assistant's.",
                    field="chat_history",
                )
            started = self._lm.tokenizer.encode(last["content"])
        ids = (*self._lm.chat_template.render(messages), *started)
        text = self._lm.tokenizer.decode(ids, controls=True)
        if self._rendered.setdefault(text, ids) != ids:
            raise InputError(f"two chats have the same text {text!r:.60}; rename the controls spelled in it.")
        return text

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        if isinstance(chat_template, str):
            raise InputError(
                f"the chat template {chat_template!r} cannot be chosen; the checkpoint has one.",
                field="chat_template",
            )
        return "the checkpoint's" if chat_template else ""

    def _text_ids(self, text: str) -> tuple[int, ...]:
        tokenizer = self._lm.tokenizer
        bos = tokenizer.template_names.get("bos_token", "<bos>")
        if bos in tokenizer.controls and text.startswith(bos):
            raise InputError(
                f"a prompt begins with {bos!r}, but this model's template did not make it here; run without "
                "lm-eval's cache of requests."
            )
        return (self._first_token, *tokenizer.encode(text))

    @property
    def _first_token(self) -> int:
        tokenizer = self._lm.tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        if first is None:
            raise InputError("the tokenizer has neither a beginning nor an end of text; lm-eval needs one.")
        return first


def _last(ids: tuple[int, ...], max_len: int) -> tuple[int, ...]:
    if len(ids) <= max_len:
        return ids
    _LOG.warning("a prompt of %d tokens is cut to its last %d", len(ids), max_len)
    return ids[-max_len:]


def _positive_integer(name: str, value: object) -> int:
    """`value` as an integer of at least 1. Command lines of lm-eval give numbers as text."""
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InputError.about(name, f"is {value!r}; it must be a whole number of at least 1.")
    return number


def _bar(items: Iterator[Any], total: int, name: str, quiet: bool) -> Iterator[Any]:
    bar: Any = import_lm_eval("tqdm").tqdm
    yield from bar(items, total=total, desc=name, disable=quiet)
