"""The options of an engine, the blocks that no sequence has, and its abilities."""

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.backend import AUTO, AttentionPlanner
from alignedserve.runtime.kv.block_storage import BlockStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How many sequences an engine holds, and how it computes them."""

    max_sequences: int
    max_context_len: int
    max_running: int | None = None  # sequences of one decoding step, as graphs are recorded for; None: all
    attention: str = AUTO  # one of CHOICES of runtime.attention
    # Sequences may have a hidden cache, whose blocks hold so many tokens each; memory is allocated for it.
    hidden_block_tokens: int | None = None
    launches_ahead: bool | None = None  # steps, before the tokens of the one before are known; None: on a GPU
    stops_passes: bool = False  # others may run between the layers of a step with chunks: none is launched ahead

    @property
    def most_running(self) -> int:
        return self.max_running or self.max_sequences


@dataclass(frozen=True, slots=True)
class OwnBlocks:
    """Blocks of an engine's storage for itself, which no sequence has."""

    lent: Sequence[BlockId] = ()  # see BlockLoans
    ring_scratch: Sequence[BlockId] = ()  # for chunks, where layers with a window have rings; see RingTables


NO_OWN_BLOCKS = OwnBlocks()


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """The abilities of an engine by its attention, blocks and device."""

    plans_ahead: bool  # the next step, while one is computed
    launches_ahead: bool  # the next step, before the tokens of this one are known
    launches_chunks: bool  # in steps that are launched ahead
    shares_blocks: bool  # two sequences fill a block from its two ends

    @classmethod
    def of(
        cls, options: EngineOptions, storage: BlockStorage, planner: AttentionPlanner, *, has_ranks: bool
    ) -> "EngineAbilities":
        """Find out what an engine can do. `has_ranks`: others compute the model with it."""
        layout = storage.layout
        has_rings = layout.ring_layers > 0
        changes_states = layout.has_states and not has_rings  # a step that is dropped has; rings have blocks to spare
        wants_launches = options.launches_ahead
        if wants_launches is None:
            wants_launches = storage.device.type != "cpu"
        return cls(
            plans_ahead=planner.plans_ahead and not changes_states,
            launches_ahead=(wants_launches and not has_ranks and not planner.reads_unused_slots and not changes_states),
            # What rings had is lost where such a step is dropped.
            launches_chunks=not options.stops_passes and not has_rings,
            # Zeroing a new block would clear the slots of a second sequence, and a block has one state.
            shares_blocks=not planner.reads_unused_slots and not layout.has_states,
        )
