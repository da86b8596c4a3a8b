"""The suites of `alignedserve eval`: the pocket model's own tasks, and questions for instruct models."""

from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.client.openai_client import CompletionApi, CompletionCall
from alignedserve.pocket.tasks import PocketTask
from lab.evaluation.accuracy import EvalItem, make_items
from lab.evaluation.pocket_calls import pocket_tokenizer, task_call
from lab.evaluation.questions import Question, make_questions
from lab.loadgen.prompts import CountTokens

POCKET = "pocket"
_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Suite:
    """Items to ask, and the call of one for the model of a name."""

    items: list[EvalItem]
    call: Callable[[EvalItem, str], CompletionCall]


def make_suite(name: str, num_per_group: int, seed: int) -> Suite:
    """Return the pocket model's tasks, or for any other name the questions."""
    if name == POCKET:
        return _pocket(num_per_group, seed, pocket_tokenizer())
    items = [EvalItem(question.group, question) for question in make_questions(num_per_group)]
    return Suite(items, lambda item, model: _question_call(item.task, model))


def _pocket(num_per_group: int, seed: int, count_tokens: CountTokens) -> Suite:
    items = make_items(num_per_group, seed, count_tokens)
    return Suite(items, lambda item, model: task_call(item.task, model, count_tokens))


def _question_call(question: PocketTask | Question, model: str) -> CompletionCall:
    messages = [{"role": "user", "content": question.prompt}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": _ANSWER_TOKENS}
    return CompletionCall(CompletionApi.CHAT, body)
