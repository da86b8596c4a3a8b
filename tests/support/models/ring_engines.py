"""Tiny engines whose layers with a window keep no more than it."""

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.ring_tables import num_scratch_blocks
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepOutput, StepSlice
from alignedserve.runtime.engine.engine_options import EngineOptions, OwnBlocks
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.step_passes import Capture
from alignedserve.runtime.kv.block_storage import BlockStorage
from tests.support.models.tiny_engines import BLOCK_SIZE, GREEDY

NUM_BLOCKS, MAX_TOKENS = 400, 160


class RingEngine:
    """An engine and the owner of its blocks, which are NaN until they are written."""

    def __init__(
        self,
        decoder: Decoder,
        attention: str,
        capture: Capture | None = None,
        *,
        num_lent: int = 0,
        launches_ahead: bool | None = None,
    ) -> None:
        self.layout = decoder.config.layout_of_rings(decoder.config.block_layout(BLOCK_SIZE, "float32"))
        has_scratch = capture is not None or decoder.device.type != "cpu"
        self.storage = BlockStorage(self.layout, NUM_BLOCKS, decoder.device, has_scratch=has_scratch)
        self.storage.bytes.fill_(0xFF)
        num_scratch = num_scratch_blocks(self.layout, MAX_TOKENS, 4)
        self.free = [BlockId(block) for block in range(NUM_BLOCKS)][::-1]
        self.engine = Engine(
            model=decoder,
            storage=self.storage,
            options=EngineOptions(
                max_sequences=4, max_context_len=256, attention=attention, launches_ahead=launches_ahead
            ),
            capture=capture,
            own_blocks=OwnBlocks(ring_scratch=self.take(num_scratch), lent=self.take(num_lent)),
        )

    def take(self, count: int) -> tuple[BlockId, ...]:
        return tuple(self.free.pop() for _ in range(count))

    def add(self, name: str, tokens: list[int], num_cached: int = 0, blocks: tuple[BlockId, ...] = ()) -> None:
        blocks = blocks or self.take(self.layout.blocks_for(len(tokens) + 60))
        self.engine.add_sequence(NewSequence(RequestId(name), tuple(tokens), len(tokens), num_cached, blocks, GREEDY))

    def step(self, **slices: int) -> StepOutput:
        return self.engine.execute([StepSlice(RequestId(name), count) for name, count in slices.items()])

    def tokens(self, name: str) -> list[int]:
        return list(self.engine.token_ids(RequestId(name)))
