"""Decisions as OpenAI's clients read them, and as Mercury's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dgemma.canvas.decide import Decided, Decision
from dgemma.server.api_error import timed_out
from dgemma.server.replies import Reply
from dgemma.server.state_request import NamedChoiceParam, NamedParam, NamedScoreParam, StateRequest
from dgemma.server.work import Counts, Done, WorkWriter
from dgemma.server.work_replies import (
    ChoiceAnswer,
    ChoiceProbability,
    DecisionUsage,
    InputTokensDetails,
    LevelProbability,
    NamedChoiceAnswer,
    NamedDecision,
    NamedDecisionUsage,
    NamedScoreAnswer,
    NoulAnswer,
    OutputTokensDetails,
    PredicateAnswer,
    ScoreAnswer,
)
from dgemma.server.work_replies import Decision as DecisionReply


class _Writer(WorkWriter[Decided]):
    def counts(self, done: Done[Decided]) -> Counts:
        return Counts(
            prompt_tokens=0 if done.result is None else done.result.prompt_tokens,
            reason="deadline" if done.result is None else "stop",
        )


@dataclass(frozen=True, kw_only=True)
class DecisionWriter(_Writer):
    """Answers in the order of the questions."""

    model: str

    def whole(self, done: Sequence[Done[Decided]]) -> Reply:
        decided = _result(done)
        read = decided.prompt_tokens
        cached = min(done[0].tally.cached_tokens or 0, read)
        return DecisionReply(
            answers=[_answer(decision) for decision in decided.decisions],
            model=self.model,
            usage=DecisionUsage(
                input_tokens=read,
                # Nobody pays for what is kept, nor is it promised.
                input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
                output_tokens=0,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
                total_tokens=read,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class NamedDecisionWriter(_Writer):
    """Answers under the names of their questions."""

    request: StateRequest

    def whole(self, done: Sequence[Done[Decided]]) -> Reply:
        decided = _result(done)
        by_name = {decision.question.name: decision for decision in decided.decisions}
        return NamedDecision(
            answers={
                name: _named_answer(param, by_name.get(name))
                for name, param in self.request.questions.items()
            },
            model=self.request.model,
            usage=NamedDecisionUsage(input_tokens=decided.prompt_tokens, output_tokens=0),
        )


def _result(done: Sequence[Done[Decided]]) -> Decided:
    result = done[0].result
    if result is None:  # half of a probability is of no use to anybody
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
    if decision is None:  # of one option
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
