"""Common beginnings of prompts: runs of equal texts.

No trace tells what was written, but some tell what was written twice. A prompt begins with runs of texts that have
numbers or names; two prompts whose runs begin alike have the same tokens there, so that a prefix cache can keep them.
Whatever follows the runs is the prompt's own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lab.workload.requests import TextRun, TimedRequest

HASH_BLOCK_LEN = 512  # tokens by one of Mooncake's `hash_ids`
MAX_HASH_ID = 1 << 62


def runs_of(hash_ids: Sequence[int], prompt_len: int) -> tuple[TextRun, ...]:
    """Return the runs of a prompt by the ids of its blocks; what they do not cover is its own.

    Raises ValueError for more ids than there are blocks, or an id out of range.
    """
    num_blocks = -(-prompt_len // HASH_BLOCK_LEN)
    if len(hash_ids) > num_blocks:
        raise ValueError(f"{len(hash_ids)} hash_ids, but {prompt_len} tokens have {num_blocks} blocks")
    if hash_ids and not (min(hash_ids) >= 0 and max(hash_ids) <= MAX_HASH_ID):
        raise ValueError(f"hash_ids must lie between 0 and {MAX_HASH_ID}")
    last_len = prompt_len - (num_blocks - 1) * HASH_BLOCK_LEN
    lens = [HASH_BLOCK_LEN] * (num_blocks - 1) + [last_len]
    return tuple(map(TextRun, hash_ids, lens))


def in_repetition(runs: Iterable[TextRun], number: int) -> tuple[TextRun, ...]:
    """Return the runs of a trace that is played again: other texts than when it was played before."""
    if not number:
        return tuple(runs)
    return tuple(TextRun(f"{number}/{run.text}", run.num_tokens) for run in runs)


def after_instruction(request: TimedRequest, instruction: TextRun | None) -> TimedRequest:
    """Return the request with an instruction, if there is one, before everything else."""
    if instruction is None:
        return request
    prompt_len = instruction.num_tokens + request.prompt_len
    return replace(request, prompt_len=prompt_len, runs=(instruction, *request.runs))


def conversation(turns: Sequence[TimedRequest], name: str, instruction: TextRun | None = None) -> TimedRequest:
    """Return the first turn of a conversation; each of the others follows an answer.

    Prompts of `turns` are what the user says in each. Every turn repeats the instruction, all that was said before and
    all answers. Example: an instruction of 1000, then 20 and 30 tokens answered by 50 each: the prompts have 1020 and
    1000 + 20 + 49 + 30 tokens, as the stop token, the last of an answer, is not repeated.
    """
    history = [] if instruction is None else [instruction]
    made: list[TimedRequest] = []
    for number, turn in enumerate(turns):
        history.append(TextRun(f"{name}/{number}", turn.prompt_len))
        prompt_len = sum(run.num_tokens for run in history)
        answer = TextRun(f"{name}/{number}/answer", max(turn.output_len - 1, 0))
        made.append(replace(turn, prompt_len=prompt_len, runs=tuple(history), answer=answer.text))
        history.append(answer)
    first = made.pop()
    while made:
        first = replace(made.pop(), follow_up=first)
    return first
