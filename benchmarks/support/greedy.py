"""Greedy answers of a decoder, one prompt after the other, without schedulers."""

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.kv.block_storage import BlockStorage

_BLOCK_SIZE = 16
_NAME = RequestId("prompt")


def greedy_answers(decoder: Decoder, prompts: list[list[int]], max_tokens: int, ends: set[int]) -> list[list[int]]:
    """Return the tokens of each answer, with the one that ends it."""
    longest = max(map(len, prompts)) + max_tokens
    num_blocks = blocks_for(longest, _BLOCK_SIZE)
    storage = BlockStorage(decoder.config.block_layout(_BLOCK_SIZE, decoder.dtype_name), num_blocks)
    engine = Engine(model=decoder, storage=storage, max_sequences=1, max_context_len=longest)
    blocks = tuple(BlockId(block) for block in range(num_blocks))
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    answers = []
    for prompt in prompts:
        engine.add_sequence(NewSequence(_NAME, tuple(prompt), len(prompt), 0, blocks, sampling))
        answer: list[int] = []
        while len(answer) < max_tokens and not ends.intersection(answer[-1:]):
            count = 1 if answer else len(prompt)
            (token,) = engine.execute([StepSlice(_NAME, count)]).sampled
            answer.append(token.token_id)
        engine.remove_sequence(_NAME)
        answers.append(answer)
    return answers
