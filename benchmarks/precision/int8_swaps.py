"""Effect of 8-bit copies in host memory (decode.swap_format=int8; ALISE, section 3.2) on the pocket model's answers.

    python -m benchmarks.precision.int8_swaps [tasks per skill and context length]

The tasks of `alignedserve eval`, greedy, in this process. Every request is swapped out and in again right after its
prompt and then after every 8th token, so that its whole cache is rounded again and again; a fleet does so far less
often.
"""

import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.evaluation.accuracy import EvalAnswer, EvalItem, make_items, score
from alignedserve.evaluation.pocket_calls import task_call
from alignedserve.loadgen.prompts import load_tokenizer
from alignedserve.messages.iterations import Addition, RunIteration, Swap, Swaps
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.text.chat_prompt import ChatPrompt
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.support.recording import write_result

BLOCK_SIZE, BATCH_SIZE = 16, 32
DEFAULT_TASKS = 50
MEMORY_BYTES = 512 << 20
ITERATIONS_BETWEEN_SWAPS = 8


class SwappingEngine:
    """Answers requests in fixed batches, every one of which is swapped out and in."""

    def __init__(self, *, swap_format: str | None) -> None:
        """`swap_format`: exact, int8, or None: nothing is swapped."""
        served = resolve_model(ModelSectionConfig())
        has_int8_swaps = swap_format == "int8"
        sizes = EngineSizes(MEMORY_BYTES, BATCH_SIZE, BLOCK_SIZE, has_int8_swaps=has_int8_swaps)
        self._executor = ModelExecutor(served, sizes)
        self._swaps = swap_format is not None
        self._leaving: tuple[RequestId, ...] = ()  # with the next iteration

    def close(self) -> None:
        """End its threads."""
        self._executor.close()

    def answer(self, prompts: Sequence[tuple[int, ...]], max_tokens: Sequence[int]) -> list[list[int]]:
        """Answer greedily, up to an end-of-sequence token; at most BATCH_SIZE at a time."""
        requests = [
            Request(RequestId(str(number)), prompt, SamplingParams(temperature=0.0, max_tokens=limit), "", 0.0)
            for number, (prompt, limit) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        blocks, first = {}, 0
        for request in requests:
            count = blocks_for(request.prompt_len + request.sampling.max_tokens, BLOCK_SIZE)
            blocks[request.request_id] = tuple(map(BlockId, range(first, first + count)))
            first += count
        generated: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
        running = requests
        additions = [Addition(request, (), blocks[request.request_id]) for request in requests]
        slices = [(request.request_id, request.prompt_len) for request in requests]
        command = RunIteration(self._leaving, tuple(additions), (), tuple(slices))
        for iteration in range(max(max_tokens)):
            for token in self._executor.run_iteration(command).sampled:
                generated[token.request_id].append(token.token_id)
            ended = [request for request in running if self._is_over(request, generated[request.request_id])]
            running = [request for request in running if request not in ended]
            self._leaving = tuple(request.request_id for request in ended)
            if not running:
                break
            again = running if self._swaps and iteration % ITERATIONS_BETWEEN_SWAPS == 0 else []
            command = _next_command(running, self._leaving, again, generated, blocks)
        return list(generated.values())

    def _is_over(self, request: Request, tokens: Sequence[int]) -> bool:
        return len(tokens) == request.sampling.max_tokens or tokens[-1] in self._executor.eos_token_ids


def _next_command(
    running: Sequence[Request],
    removals: tuple[RequestId, ...],
    again: Sequence[Request],
    generated: dict[RequestId, list[int]],
    blocks: dict[RequestId, tuple[BlockId, ...]],
) -> RunIteration:
    """Return a command for one token of each; those in `again` are swapped out and in before."""
    swaps, additions = [], []
    for request in again:
        own, tokens = blocks[request.request_id], tuple(generated[request.request_id])
        num_cached = request.prompt_len + len(tokens) - 1
        swaps.append(Swap(request.request_id, num_cached, own[: blocks_for(num_cached, BLOCK_SIZE)]))
        additions.append(Addition(request, tokens, own, num_cached))
    return RunIteration(
        (*removals, *(request.request_id for request in again)),
        tuple(additions),
        (),
        tuple((request.request_id, 1) for request in running),
        Swaps((), tuple(swaps), tuple(swaps)) if swaps else None,
    )


def answer_all(items: Sequence[EvalItem], swap_format: str | None) -> list[EvalAnswer]:
    """Return the answer to every task."""
    count_tokens, tokenizer = load_tokenizer(pocket_folder()), Tokenizer.load(pocket_folder())
    now = datetime.now().astimezone()
    engine = SwappingEngine(swap_format=swap_format)
    answers = []
    for first in range(0, len(items), BATCH_SIZE):
        batch = items[first : first + BATCH_SIZE]
        messages = [[{"role": "user", "content": item.task.prompt}] for item in batch]
        prompts = [tuple(tokenizer.encode_chat(ChatPrompt(message), now=now)) for message in messages]
        limits = [task_call(item.task, "pocket", count_tokens).body["max_tokens"] for item in batch]
        for item, tokens in zip(batch, engine.answer(prompts, limits), strict=True):
            answers.append(EvalAnswer(item, tokenizer.decode(tokens)))
    engine.close()
    return answers


def main() -> None:
    """Measure, print, record."""
    num_tasks = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_TASKS
    items = make_items(num_tasks, 0, load_tokenizer(pocket_folder()))
    undisturbed = answer_all(items, None)
    figures: dict[str, Any] = {"tasks": len(items), "share_right": {"undisturbed": _share_right(undisturbed)}}
    for swap_format in ("exact", "int8"):
        answers = answer_all(items, swap_format)
        same = sum(one.text == other.text for one, other in zip(answers, undisturbed, strict=True))
        figures["share_right"][swap_format] = _share_right(answers)
        figures[f"share_same_{swap_format}"] = same / len(items)
        report = score(answers)
        figures[f"by_group_{swap_format}"] = {row.name: row.accuracy for row in (*report.skills, *report.contexts)}
        print(figures, flush=True)
    write_result("int8_swaps", figures)


def _share_right(answers: Sequence[EvalAnswer]) -> float:
    return sum(answer.is_correct for answer in answers) / len(answers)


if __name__ == "__main__":
    main()
