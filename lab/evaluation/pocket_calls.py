"""The pocket model's tokenizer, and tasks as calls: shared by evaluation and demo."""

from importlib import resources
from pathlib import Path
from typing import Any

from alignedserve.client.openai_client import CompletionApi, CompletionCall
from alignedserve.pocket.tasks import PocketTask
from lab.evaluation.questions import Question
from lab.loadgen.prompts import CountTokens, load_tokenizer

CONTEXT_LEN = 2048  # of the pocket model
MIN_PROMPT_LEN, MAX_PROMPT_LEN = 30, 1900  # what make_long_task can make
TEMPLATE_LEN = 8  # tokens that the chat template adds, at most
SPARE_LEN = 16  # tokens beyond the right answer before a wrong one is cut off


def pocket_tokenizer() -> CountTokens:
    """Return a function that counts tokens as the pocket model does."""
    return load_tokenizer(Path(str(resources.files("alignedserve.pocket"))) / "model")


def task_call(
    task: PocketTask | Question, model: str, count_tokens: CountTokens, *, has_logprobs: bool = False
) -> CompletionCall:
    """Return the task as a greedy chat completion of a few tokens more than its answer needs."""
    num_left = CONTEXT_LEN - TEMPLATE_LEN - count_tokens(task.prompt)
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": task.prompt}],
        "temperature": 0,
        "max_tokens": max(1, min(count_tokens(task.answer) + SPARE_LEN, num_left)),
    }
    if has_logprobs:
        body["logprobs"] = True
    return CompletionCall(CompletionApi.CHAT, body)
