"""Decisions: questions with fixed answers, as probabilities, in OpenAI's shape or in Mercury's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from dgemma.server.decisions.protocol import (
    ChoiceAnswer,
    ChoiceProbability,
    ConversationItem,
    ConversationMessage,
    CustomToolCall,
    CustomToolCallOutput,
    DecisionRequest,
    DecisionResponse,
    DecisionUsage,
    FunctionCallItem,
    FunctionCallOutput,
    LevelProbability,
    NamedChoiceAnswer,
    NamedChoiceParam,
    NamedDecisionResponse,
    NamedDecisionUsage,
    NamedParam,
    NamedScoreAnswer,
    NamedScoreParam,
    NoulAnswer,
    PredicateAnswer,
    ScoreAnswer,
    StateRequest,
    text_of,
)
from dgemma.server.http.errors import context_too_long, invalid, shown, timed_out
from dgemma.server.plan import ResponseWriter, ServingPlan, TaskCounts, TaskOutcome
from dgemma.server.protocol import CommonFields, InputTokensDetails, OutputTokensDetails, ResponseModel
from dgemma.server.serving import ServingBase, new_id
from dgemma.tasks.calibration import Calibration
from dgemma.tasks.context import TaskContext
from dgemma.tasks.decide import Decided, Decision, Question, decide
from dgemma.tasks.rounds import Rounds

# The same request has the same answer, unless the client gives another seed.
_SEED = 0


class DecisionServing(ServingBase):
    """The handler of /v1/decisions and /v1/systemone."""

    def create_decision(self, request: DecisionRequest) -> ServingPlan[Decided]:
        """OpenAI's shape."""
        text = request.input if isinstance(request.input, str) else messages_of(request.input)
        writer = DecisionWriter(model=request.model)
        return self._plan(request, text, request.to_questions(), writer, "input")

    def create_named_decision(self, request: StateRequest) -> ServingPlan[Decided]:
        """Mercury's shape."""
        named = request.to_questions()
        questions = [question for question in named.values() if question is not None]
        return self._plan(request, request.text, questions, NamedDecisionWriter(request=request), "state")

    def _plan(
        self,
        request: CommonFields,
        text: str | Sequence[Mapping[str, Any]],
        questions: Sequence[Question],
        writer: ResponseWriter[Decided],
        field: str,
    ) -> ServingPlan[Decided]:
        seed = _SEED if request.seed is None else request.seed
        task = self.task_context(request, id_=new_id("decision"), seed=seed)
        rounds = _decided(
            task,
            text,
            questions,
            self.context.calibration,
            field=field,
            most_prompt_tokens=self.settings.max_prompt_tokens,
        )
        return ServingPlan(
            model=request.model,
            start=lambda _: (rounds,),
            num_choices=1,
            writer=writer,
            deadline_s=self.deadline_s(task),
            field_names={"questions": "questions"},
            default_field=field,
        )


def _decided(
    task: TaskContext,
    text: str | Sequence[Mapping[str, Any]],
    questions: Sequence[Question],
    calibration: Calibration | None,
    *,
    field: str,
    most_prompt_tokens: int | None,
) -> Rounds[Decided]:
    """`decide`, with the server's limit of prompt tokens."""
    if not questions:
        return Decided(decisions=(), forwards=0, prompt_tokens=0, cached_tokens=0, seed=task.seed)
    rounds = decide(task, text, questions, calibration=calibration)
    try:
        requests = next(rounds)
        count = len(requests[0].prompt)
        if most_prompt_tokens is not None and count > most_prompt_tokens:
            raise context_too_long(
                f"{field} and questions have {count} tokens; this server takes at most {most_prompt_tokens}. "
                "Shorten them.",
                field,
            )
        while True:
            requests = rounds.send((yield requests))
    except StopIteration as end:
        decided: Decided = end.value
        return decided


Role = Literal["system", "user", "assistant"]


def messages_of(items: Sequence[ConversationItem]) -> list[dict[str, str]]:
    """One message per turn. Instructions come first; calls and their results become text."""
    turns: list[tuple[Role, str]] = []
    called: dict[str, str] = {}  # names by the id of their call
    for number, item in enumerate(items):
        where = f"input.{number}"
        match item:
            case ConversationMessage():
                # A later one is a turn of the user's: only those at the beginning are of the system.
                is_first = not turns or turns[-1][0] == "system"
                turns.append(_message_turn(item, where, is_first=is_first))
            case FunctionCallItem() | CustomToolCall():
                called[item.call_id] = item.name
                arguments = item.arguments if isinstance(item, FunctionCallItem) else item.input
                turns.append(("assistant", f"Calls {item.name}: {arguments}"))
            case FunctionCallOutput() | CustomToolCallOutput():
                if item.call_id not in called:
                    raise invalid(
                        f"{where}.call_id is {shown(item.call_id)}; no call before it has this id.",
                        f"{where}.call_id",
                    )
                result = text_of(item.output, f"{where}.output")
                turns.append(("user", f"Result of {called[item.call_id]}: {result}"))
    return [
        {"role": role, "content": "\n\n".join(text for _, text in group)}
        for role, group in groupby(turns, key=itemgetter(0))
    ]


def _message_turn(message: ConversationMessage, where: str, *, is_first: bool) -> tuple[Role, str]:
    text = text_of(message.content, f"{where}.content")
    if message.role in ("system", "developer"):
        return ("system", text) if is_first else ("user", f"{message.role}: {text}")
    return ("assistant" if message.role == "assistant" else "user"), text


class _DecisionWriterBase(ResponseWriter[Decided]):
    def counts(self, outcome: TaskOutcome[Decided]) -> TaskCounts:
        return TaskCounts(
            prompt_tokens=0 if outcome.result is None else outcome.result.prompt_tokens,
            reason="deadline" if outcome.result is None else "stop",
        )


@dataclass(frozen=True, kw_only=True)
class DecisionWriter(_DecisionWriterBase):
    """Answers in the order of the questions."""

    model: str

    def response(self, outcomes: Sequence[TaskOutcome[Decided]]) -> ResponseModel:
        decided = _result(outcomes)
        read = decided.prompt_tokens
        cached = min(outcomes[0].usage.cached_tokens or 0, read)
        return DecisionResponse(
            answers=[_answer(decision) for decision in decided.decisions],
            model=self.model,
            usage=DecisionUsage(
                input_tokens=read,
                # Writing to the prefix cache is neither billed nor promised.
                input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
                output_tokens=0,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
                total_tokens=read,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class NamedDecisionWriter(_DecisionWriterBase):
    """Answers under the names of their questions."""

    request: StateRequest

    def response(self, outcomes: Sequence[TaskOutcome[Decided]]) -> ResponseModel:
        decided = _result(outcomes)
        by_name = {decision.question.name: decision for decision in decided.decisions}
        return NamedDecisionResponse(
            answers={
                name: _named_answer(param, by_name.get(name))
                for name, param in self.request.questions.items()
            },
            model=self.request.model,
            usage=NamedDecisionUsage(input_tokens=decided.prompt_tokens, output_tokens=0),
        )


def _result(outcomes: Sequence[TaskOutcome[Decided]]) -> Decided:
    result = outcomes[0].result
    if result is None:  # an unfinished probability is of no use
        raise timed_out(
            "the deadline came before all questions were answered; ask fewer, or give it more time."
        )
    return result


def _answer(decision: Decision) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    question = decision.question
    pairs = zip(question.choices, decision.probabilities, strict=True)
    match question.kind:
        case "predicate":
            return PredicateAnswer(type="predicate", name=question.name, probability=decision.probability)
        case "choice":
            return ChoiceAnswer(
                type="choice",
                name=question.name,
                choice=decision.choice,
                confidence=decision.confidence,
                probabilities=[ChoiceProbability(value=c.value, probability=p) for c, p in pairs],
            )
    return ScoreAnswer(
        type="score",
        name=question.name,
        score=decision.score,
        confidence=decision.confidence,
        probabilities=[
            LevelProbability(value=level, label=choice.label, probability=p)
            for level, (choice, p) in enumerate(pairs)
        ],
    )


def _named_answer(
    param: NamedParam, decision: Decision | None
) -> NoulAnswer | NamedChoiceAnswer | NamedScoreAnswer:
    if decision is None:  # only one option
        assert isinstance(param, NamedChoiceParam)
        (only,) = param.criteria
        return NamedChoiceAnswer(type="choice", choice=only, confidence=1.0, probabilities={only: 1.0})
    labels = [choice.label for choice in decision.question.choices]
    probabilities = dict(zip(labels, decision.probabilities, strict=True))
    match param:
        case NamedChoiceParam():
            return NamedChoiceAnswer(
                type="choice",
                choice=labels[decision.index],
                confidence=decision.confidence,
                probabilities=probabilities,
            )
        case NamedScoreParam():
            return NamedScoreAnswer(
                type="score",
                score=decision.score,
                confidence=decision.confidence,
                legend=dict(zip(labels, param.criteria, strict=True)),
                probabilities=probabilities,
            )
    return NoulAnswer(type="noul", noul=decision.probability)
