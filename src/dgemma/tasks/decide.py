"""Questions with given answers: a template on a canvas, its slots read as probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dgemma.errors import InputError
from dgemma.tasks.calibration import Calibration
from dgemma.tasks.context import Ids, TaskContext
from dgemma.tasks.rounds import Rounds
from dgemma.tasks.slots import Part, Slot, read_slots, template_len

Kind = Literal["predicate", "choice", "score"]
Value = str | bool

MAX_QUESTIONS = 400
MAX_CHOICES = 255
DEFAULT_STEPS = 1
DEFAULT_DRAWS = 4
_ASK = "Answer each question with one of its choices, in the form `number: choice`."


@dataclass(frozen=True, kw_only=True)
class Choice:
    value: Value
    description: str = ""

    @property
    def label(self) -> str:
        """As the model writes it."""
        return str(self.value).lower() if isinstance(self.value, bool) else self.value


YES, NO = Choice(value="yes"), Choice(value="no")


@dataclass(frozen=True, kw_only=True)
class Question:
    """predicate: is it so? choice: which one? score: which of these levels, the lowest first?"""

    kind: Kind
    instructions: str
    choices: tuple[Choice, ...] = (YES, NO)
    name: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("predicate", "choice", "score"):
            raise InputError(f"a question is of kind {self.kind!r}; kinds: predicate, choice, score.")
        what = "levels" if self.kind == "score" else "choices"
        if not 2 <= len(self.choices) <= MAX_CHOICES:
            raise InputError(f"a question has {len(self.choices)} {what}; give 2 to {MAX_CHOICES}.")
        wrong = next((c.value for c in self.choices if not isinstance(c.value, str | bool)), None)
        if wrong is not None:
            raise InputError(f"one of the {what} is {wrong!r}; each must be a text, true or false.")
        labels = [choice.label for choice in self.choices]
        if not all(label.strip() for label in labels):
            raise InputError(f"one of the {what} is empty; each needs a text.")
        if len(set(labels)) != len(labels):
            twice = next(label for label in labels if labels.count(label) > 1)
            raise InputError(f"two {what} read {twice!r}; the model could not tell them apart.")


@dataclass(frozen=True, kw_only=True)
class Decision:
    question: Question
    probabilities: tuple[float, ...]  # of the choices, in their order; they sum to 1

    @property
    def choice(self) -> Value:
        return self.question.choices[self.index].value

    @property
    def index(self) -> int:
        return self.probabilities.index(max(self.probabilities))

    @property
    def confidence(self) -> float:
        return max(self.probabilities)

    @property
    def probability(self) -> float:
        """Of a predicate: that it is so. Of others: of their first choice."""
        return self.probabilities[0]

    @property
    def score(self) -> float:
        """The mean level, the lowest being 0."""
        return sum(level * p for level, p in enumerate(self.probabilities))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": self.question.kind, "name": self.question.name}
        if self.question.kind == "predicate":
            return {**found, "probability": self.probability}
        pairs = list(zip(self.question.choices, self.probabilities, strict=True))
        found["confidence"] = self.confidence
        if self.question.kind == "score":
            levels = [{"label": c.value, "value": n, "probability": p} for n, (c, p) in enumerate(pairs)]
            return {**found, "score": self.score, "probabilities": levels}
        values = [{"value": choice.value, "probability": p} for choice, p in pairs]
        return {**found, "choice": self.choice, "probabilities": values}


@dataclass(frozen=True, kw_only=True)
class Decided:
    decisions: tuple[Decision, ...]  # in the order of the questions
    forwards: int  # denoise forwards of canvases
    prompt_tokens: int
    cached_tokens: int
    seed: int


def decide(
    task: TaskContext,
    context: str | Sequence[Mapping[str, Any]],
    questions: Sequence[Question],
    *,
    steps: int = DEFAULT_STEPS,
    draws: int = DEFAULT_DRAWS,
    calibration: Calibration | None = None,
) -> Rounds[Decided]:
    """How likely each choice of each question is, given a text or a conversation."""
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise InputError(
            f"there are {len(questions)} questions; ask 1 to {MAX_QUESTIONS}.", field="questions"
        )
    prompt = _prompt(task, context, questions)
    decisions: list[Decision] = []
    forwards = cached = 0
    for canvas in _canvases(task, questions):
        parts: list[Part] = []
        for number, question in canvas:
            parts += _line(task, number, question)
        read = yield from read_slots(task, prompt, parts, steps=steps, draws=draws)
        forwards += read.forwards
        cached = max([cached, *(answer.cached_tokens for answer in read.answers[:1])])
        for (_, question), probabilities in zip(canvas, read.probabilities, strict=True):
            own = probabilities if calibration is None else calibration.apply(probabilities)
            decisions.append(Decision(question=question, probabilities=own))
    return Decided(
        decisions=tuple(decisions),
        forwards=forwards,
        prompt_tokens=len(prompt),
        cached_tokens=cached,
        seed=task.seed,
    )


def _line(task: TaskContext, number: int, question: Question) -> list[Part]:
    encode = task.tokenizer.encode
    lead = f"{number}: "
    labels = tuple(tuple(encode(lead + choice.label)) for choice in question.choices)
    # One token may join the blank and the label: the line is cut where all labels still agree.
    shared = 0
    for tokens in zip(*(label[:-1] for label in labels), strict=False):
        if len(set(tokens)) > 1:
            break
        shared += 1
    opening = labels[0][:shared]
    rests = tuple(label[shared:] for label in labels)
    return [opening, Slot(rests), tuple(encode("\n"))]


def _canvases(task: TaskContext, questions: Sequence[Question]) -> list[list[tuple[int, Question]]]:
    """Questions with their numbers, as many per canvas as fit."""
    canvases: list[list[tuple[int, Question]]] = [[]]
    used = 0
    for number, question in enumerate(questions, start=1):
        size = template_len(_line(task, number, question))
        if size > task.canvas_len:
            raise InputError(
                f"a choice of question {number} has too many tokens for a canvas of {task.canvas_len}; "
                "shorten it.",
                field="questions",
            )
        if used + size > task.canvas_len:
            canvases.append([])
            used = 0
        canvases[-1].append((number, question))
        used += size
    return canvases


def _prompt(
    task: TaskContext, context: str | Sequence[Mapping[str, Any]], questions: Sequence[Question]
) -> Ids:
    question_text = _question_text(questions)
    if task.template is None:
        text = context if isinstance(context, str) else _transcript(context)
        body = task.tokenizer.encode(f"{text}\n\n{question_text}\n")
        if len(body) + 1 + task.canvas_len > task.max_positions:
            raise _too_long(len(body) + 1, task)
        return task.opening(body, reserve=task.canvas_len)
    if isinstance(context, str):
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": f"{context}\n\n{question_text}"}]
    else:
        messages = [*context]
        if messages and messages[-1].get("role") == "user" and isinstance(messages[-1].get("content"), str):
            last = messages.pop()
            question_text = f"{last['content']}\n\n{question_text}"
        messages.append({"role": "user", "content": question_text})
    prompt = tuple(task.template.render(messages))
    if len(prompt) + task.canvas_len > task.max_positions:
        raise _too_long(len(prompt), task)
    return prompt


def _question_text(questions: Sequence[Question]) -> str:
    lines = [_ASK]
    for number, question in enumerate(questions, start=1):
        lines.append(f"{number}. {question.instructions}")
        # Levels have an order of their own; choices are sorted, so that theirs means nothing.
        ordered = question.choices
        if question.kind != "score":
            ordered = tuple(sorted(question.choices, key=lambda choice: choice.label))
        lines += [f"- {c.label}: {c.description}" if c.description else f"- {c.label}" for c in ordered]
    return "\n".join(lines)


def _transcript(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)


def _too_long(count: int, task: TaskContext) -> InputError:
    return InputError(
        f"input and questions have {count} tokens; this model's context of {task.max_positions} then has no "
        f"room for a canvas of {task.canvas_len}. Shorten them.",
        code="context_length_exceeded",
    )
