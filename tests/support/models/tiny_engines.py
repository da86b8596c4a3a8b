"""Engines over tiny checkpoints, for tests: block tables in shuffled order, unused slots poisoned with NaN."""

import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.picture import PictureRun
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.attention.backend import AUTO
from alignedserve.runtime.attention.registry import attention_planner
from alignedserve.runtime.attention.sequence_table import SequenceTable
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.streams import DeviceStreams
from alignedserve.runtime.engine.engine import Engine, NewSequence, RankMirror, StepOutput, StepSlice
from alignedserve.runtime.engine.engine_options import EngineOptions, OwnBlocks
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.batch_builder import BatchBuilder
from alignedserve.runtime.engine.steps.step_passes import Capture
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.runtime.pictures import RopePlaces, SequenceEmbeddings
from kernels.lora import AdapterMatrices

# Tiny products gain nothing from a second thread, and wait for it where tests run side by side.
torch.set_num_threads(1)

BLOCK_SIZE = 4
NUM_BLOCKS = 400
MAX_CONTEXT_LEN = 200
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)


def tiny_decoder(
    folder: Path, dtype: str = "float32", quantization: str | None = None, device: torch.device | str = "cpu"
) -> Decoder:
    config = read_config(folder)
    return Decoder(config, load_weights(folder, config, torch_dtype(dtype), device, quantization))


def poisoned_storage(
    decoder: Decoder, block_size: int = BLOCK_SIZE, *, has_scratch: bool = False, cache_dtype: str | None = None
) -> BlockStorage:
    layout = decoder.config.block_layout(block_size, cache_dtype or decoder.dtype_name)
    storage = BlockStorage(layout, NUM_BLOCKS, decoder.device, has_scratch=has_scratch)
    storage.bytes.fill_(0xFF)  # NaN in every dtype, scales of int8 as well
    return storage


def capture_nothing(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture nothing: for devices without graphs."""
    work()
    return work


class TinyEngine:
    """An engine and the owner of its blocks."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        seed: int = 0,
        max_sequences: int = 16,
        attention: str = AUTO,
        streams: DeviceStreams | None = None,
        capture: Capture | None = None,
        has_hidden_cache: bool = False,
        cache_dtype: str | None = None,
        masks: TokenMasks | None = None,
        ranks: RankMirror | None = None,
        launches_ahead: bool | None = None,
        num_lent: int = 0,
    ) -> None:
        """`num_lent`: blocks of the engine's own."""
        has_scratch = capture is not None or decoder.device.type != "cpu"
        self.storage = poisoned_storage(decoder, has_scratch=has_scratch, cache_dtype=cache_dtype)
        self.engine = Engine(
            model=decoder,
            storage=self.storage,
            options=EngineOptions(
                max_sequences=max_sequences,
                max_context_len=MAX_CONTEXT_LEN,
                attention=attention,
                hidden_block_tokens=decoder.config.hidden_block_tokens(BLOCK_SIZE) if has_hidden_cache else None,
                launches_ahead=launches_ahead,
            ),
            streams=streams,
            capture=capture,
            masks=masks,
            ranks=ranks,
            own_blocks=OwnBlocks(lent=[BlockId(NUM_BLOCKS - 1 - index) for index in range(num_lent)]),
        )
        self.free_blocks = [block for block in shuffled_blocks(seed) if block < NUM_BLOCKS - num_lent]
        self.blocks: dict[str, tuple[BlockId, ...]] = {}

    def take_blocks(self, num_tokens: int) -> tuple[BlockId, ...]:
        return tuple(self.free_blocks.pop() for _ in range(blocks_for(num_tokens, BLOCK_SIZE)))

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        prompt_len: int | None = None,
        spare_tokens: int = 60,
        block_tokens: int | None = None,
        adapter: AdapterMatrices | None = None,
    ) -> None:
        """`block_tokens`: layer inputs that a block of the sequence holds; None: keys and values."""
        count = blocks_for(len(tokens) + spare_tokens, block_tokens or BLOCK_SIZE)
        blocks = self.blocks[name] = tuple(self.free_blocks.pop() for _ in range(count))
        own_len, is_hidden = prompt_len or len(tokens), block_tokens is not None
        own = (RequestId(name), tuple(tokens), own_len, 0, blocks, sampling, is_hidden)
        self.engine.add_sequence(NewSequence(*own, adapter=adapter))

    def make_room(self, name: str, num_tokens: int) -> None:
        """Give the sequence blocks for so many more tokens, one after another, as it needs them."""
        count = self.engine.num_computed(RequestId(name)) + num_tokens
        missing = blocks_for(count, BLOCK_SIZE) - len(self.blocks[name])
        if missing > 0:
            blocks = self.take_blocks(missing * BLOCK_SIZE)
            self.engine.append_blocks(RequestId(name), blocks)
            self.blocks[name] += blocks

    def step(self, *, num_drafts: int = 0, **slices: int) -> StepOutput:
        """`num_drafts`: that each sequence may have."""
        parts = [StepSlice(RequestId(name), count) for name, count in slices.items()]
        return self.engine.execute(parts, drafts={part.request_id: num_drafts for part in parts} if num_drafts else {})

    def tokens(self, name: str) -> list[int]:
        return list(self.engine.token_ids(RequestId(name)))

    def generate(self, name: str, num_tokens: int, *companions: str) -> list[SampledToken]:
        """Compute what is known, then decode; companions decode along. The tokens of `name`."""
        known = self.engine.num_tokens(RequestId(name)) - self.engine.num_computed(RequestId(name))
        outputs = [self.step(**{name: known}, **dict.fromkeys(companions, 1))]
        outputs += [self.step(**dict.fromkeys((*companions, name), 1)) for _ in range(num_tokens - 1)]
        return [token for output in outputs for token in output.sampled if token.request_id == name]


class LogitsProbe:
    """The decoder and the batch builder without a sampler: logits of every token of given sequences."""

    def __init__(
        self, decoder: Decoder, block_size: int = BLOCK_SIZE, attention: str = AUTO, cache_dtype: str | None = None
    ) -> None:
        self._decoder = decoder
        self._storage = poisoned_storage(decoder, block_size, cache_dtype=cache_dtype)
        self._table = SequenceTable(max_sequences=8, max_context_len=MAX_CONTEXT_LEN, block_size=block_size)
        own = (decoder.config, decoder.dtype, decoder.scores)
        planner = attention_planner(attention, self._table, self._storage, *own)
        self._builder = BatchBuilder(self._table, self._storage, planner)
        self._free_blocks = shuffled_blocks(1)
        self._parts: dict[int, list[Tensor]] = {}

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        is_reversed: bool = False,
        adapter: AdapterMatrices | None = None,
        pictures: SequenceEmbeddings | None = None,
        places: RopePlaces | None = None,
        whole_runs: tuple[PictureRun, ...] = (),
    ) -> None:
        count = blocks_for(len(tokens), self._table.block_size)
        blocks = tuple(self._free_blocks.pop() for _ in range(count))
        own = (RequestId(name), tuple(tokens), len(tokens), 0, blocks, GREEDY)
        seen = (places, pictures, whole_runs)
        row = self._table.add(NewSequence(*own, False, is_reversed, adapter, None, *seen))
        self._parts[row] = []

    def step(self, **slices: int) -> None:
        whole = self._table.whole_slices([(RequestId(name), count) for name, count in slices.items()])
        if not whole:
            return
        step = self._builder.build([part[0] for part in whole], [part[1] for part in whole])
        hidden = self._decoder.forward(step.forward_batch(self._decoder.device), self._storage)
        for row, first, count in zip(step.rows.tolist(), step.first_rows.tolist(), step.counts.tolist(), strict=True):
            self._parts[row].append(self._decoder.logits(hidden[first : first + count]))
        self._table.num_computed[step.rows] += step.counts

    def logits(self, name: str) -> Tensor:
        """Return [tokens, vocab_size] of everything computed so far."""
        return torch.cat(self._parts[self._table.row(RequestId(name))])


def random_tokens(seed: int, count: int, vocab_size: int = 199) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, vocab_size) for _ in range(count)]


def reference_choices(reference: Any, tokens: list[int], num_known: int) -> list[int]:
    """Return which token transformers finds likeliest after each beginning of `tokens` of `num_known` or more.

    When they are the rest of `tokens`, that rest is also what transformers generates greedily.
    """
    with torch.no_grad():
        logits = reference(torch.tensor([tokens[:-1]])).logits[0]
    choices: list[int] = logits[num_known - 1 :].argmax(dim=-1).tolist()
    return choices


def shuffled_blocks(seed: int) -> list[BlockId]:
    blocks = [BlockId(block) for block in range(NUM_BLOCKS)]
    random.Random(seed).shuffle(blocks)
    return blocks


def generate_alone(
    engine: Engine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    ends: Collection[int],
    *,
    adapter: AdapterMatrices | None = None,
    pictures: SequenceEmbeddings | None = None,
    places: RopePlaces | None = None,
    whole_runs: tuple[PictureRun, ...] = (),
) -> list[int]:
    """Return the tokens of one request, on an engine without any other. `ends`: tokens after which it stops."""
    num_blocks = engine.storage.layout.blocks_for(len(prompt) + sampling.max_tokens)
    request_id, blocks = RequestId("alone"), tuple(map(BlockId, range(num_blocks)))
    own = (request_id, tuple(prompt), len(prompt), 0, blocks, sampling)
    seen = (places, pictures, whole_runs)
    engine.add_sequence(NewSequence(*own, False, False, adapter, None, *seen))
    tokens: list[int] = []
    num_tokens = len(prompt)
    while len(tokens) < sampling.max_tokens:
        tokens.append(engine.execute([StepSlice(request_id, num_tokens)]).sampled[0].token_id)
        num_tokens = 1
        if tokens[-1] in ends:
            break
    return tokens


def logits_of(decoder: Decoder, tokens: Sequence[int], *counts: int) -> torch.Tensor:
    """Return the logits behind each of these tokens, computed in passes of `counts` tokens; none: in one."""
    probe = LogitsProbe(decoder)
    probe.add("a", tokens)
    for count in counts or (len(tokens),):
        probe.step(a=count)
    return probe.logits("a")
