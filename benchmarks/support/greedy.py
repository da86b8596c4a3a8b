"""Greedy answers of a decoder, many prompts at once, without schedulers."""

from collections.abc import Iterable

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.kv.block_storage import BlockStorage

_BLOCK_SIZE = 16


def greedy_answers(decoder: Decoder, prompts: list[list[int]], max_tokens: int, ends: set[int]) -> list[list[int]]:
    """Return the tokens of each answer, with the one that ends it. Prompts are computed singly, answers together."""
    longest = max(map(len, prompts)) + max_tokens
    num_blocks = blocks_for(longest, _BLOCK_SIZE)
    storage = BlockStorage(decoder.config.block_layout(_BLOCK_SIZE, decoder.dtype_name), num_blocks * len(prompts))
    engine = Engine(model=decoder, storage=storage, max_sequences=len(prompts), max_context_len=longest)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    answers: dict[RequestId, list[int]] = {}
    for place, prompt in enumerate(prompts):
        name = RequestId(f"prompt-{place}")
        blocks = tuple(BlockId(block) for block in range(place * num_blocks, (place + 1) * num_blocks))
        engine.add_sequence(NewSequence(name, tuple(prompt), len(prompt), 0, blocks, sampling))
        answers[name] = []
        _step(engine, [StepSlice(name, len(prompt))], answers)
    while running := [name for name, answer in answers.items() if not _has_ended(answer, max_tokens, ends)]:
        _step(engine, [StepSlice(name, 1) for name in running], answers)
    return list(answers.values())


def _step(engine: Engine, slices: Iterable[StepSlice], answers: dict[RequestId, list[int]]) -> None:
    for token in engine.execute(list(slices)).sampled:
        answers[token.request_id].append(token.token_id)


def _has_ended(answer: list[int], max_tokens: int, ends: set[int]) -> bool:
    return len(answer) == max_tokens or answer[-1] in ends
