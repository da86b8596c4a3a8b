"""Accuracy: which of the pocket model's tasks to ask, and how to count right answers, of questions too. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.pocket.tasks import OFFERED_SKILLS, PocketTask, is_correct, make_long_task, make_task
from lab.evaluation.pocket_calls import MIN_PROMPT_LEN
from lab.evaluation.questions import Question
from lab.loadgen.prompts import CountTokens

CONTEXT_BUCKETS = (128, 256, 512, 1024, 1900)  # upper ends, in prompt tokens


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One task and the row of the report it counts in."""

    group: str
    task: PocketTask | Question


@dataclass(frozen=True, slots=True)
class EvalAnswer:
    """Answer of the system to one task."""

    item: EvalItem
    text: str
    failure: str | None = None

    @property
    def is_correct(self) -> bool:
        """Return whether the answer is right; a failed request has no right answer."""
        task = self.item.task
        is_right = task.accepts(self.text) if isinstance(task, Question) else is_correct(task, self.text)
        return self.failure is None and is_right


@dataclass(frozen=True, slots=True)
class GroupScore:
    """One row of the report."""

    name: str
    num_tasks: int
    num_correct: int
    num_failed: int  # requests that failed; they count as wrong

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.num_correct / self.num_tasks


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores by skill and by context length, and what was wrong."""

    skills: tuple[GroupScore, ...]
    contexts: tuple[GroupScore, ...]
    wrong: tuple[EvalAnswer, ...]

    def below(self, threshold: float) -> tuple[GroupScore, ...]:
        """Return skills under the threshold. Context lengths inform and do not judge: they ask the same skills."""
        return tuple(score for score in self.skills if score.accuracy < threshold)


def make_items(num_per_group: int, seed: int, count_tokens: CountTokens) -> list[EvalItem]:
    items = []
    for skill in OFFERED_SKILLS:
        rng = random.Random(f"{seed}/eval/{skill.value}")  # noqa: S311 - a workload, not a secret
        items += [EvalItem(skill.value, make_task(skill, rng)) for _ in range(num_per_group)]
    shortest = MIN_PROMPT_LEN
    for longest in CONTEXT_BUCKETS:
        rng = random.Random(f"{seed}/eval/context/{longest}")  # noqa: S311
        name = context_name(longest)
        for _ in range(num_per_group):
            items.append(EvalItem(name, make_long_task(rng, rng.randint(shortest, longest), count_tokens)))
        shortest = longest
    return items


def context_name(longest: int) -> str:
    return f"prompt up to {longest}"


def score(answers: Sequence[EvalAnswer]) -> EvalReport:
    """Count. Groups without answers have no row."""
    contexts = [context_name(longest) for longest in CONTEXT_BUCKETS]
    names = dict.fromkeys(answer.item.group for answer in answers)
    return EvalReport(
        skills=_scores([name for name in names if name not in contexts], answers),
        contexts=_scores(contexts, answers),
        wrong=tuple(answer for answer in answers if not answer.is_correct),
    )


def _scores(groups: Sequence[str], answers: Sequence[EvalAnswer]) -> tuple[GroupScore, ...]:
    scores = []
    for group in groups:
        members = [answer for answer in answers if answer.item.group == group]
        if not members:
            continue
        num_correct = sum(answer.is_correct for answer in members)
        num_failed = sum(answer.failure is not None for answer in members)
        scores.append(GroupScore(group, len(members), num_correct, num_failed))
    return tuple(scores)
