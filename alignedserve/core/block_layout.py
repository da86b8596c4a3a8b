"""The shape and byte size of one KV block, shared by the engine, the pool and the transports (no torch here)."""

import hashlib
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from alignedserve.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A cache rounded to 8 bits: behind the heads of every slot lie their scales, float32 (kernels.cache_rows).
INT8 = "int8"
FP8 = "fp8"  # the same of e4m3 (kernels.cache_rows)
_CACHE_DTYPE_BYTES = {**DTYPE_BYTES, INT8: 1, FP8: 1}
_SCALE_BYTES = 4
STATE_HEADER_BYTES = 64  # in front of states: how many tokens of the context they stand behind
LARGEST_BLOCK = 1024  # tokens


class LayerHeads(NamedTuple):
    """Layers of one kind in a cache, and the heads of their keys."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block: keys and values of `block_size` tokens on every layer, one contiguous run of `block_bytes` bytes.

    Order inside a block, outermost first: [num_layers, 2 (keys, values), block_size, num_kv_heads, head_dim]; of int8
    and fp8 [num_layers, 2, block_size, slot_width]. With one part in place of 2 the values are read from the keys.
    Layers whose heads have other sizes than those of the first lie behind them, kind by kind: see `kinds`; the sizes of
    a slot and of a run are those of the first kind. Behind all lie, of models that have some, the states behind the
    last of its tokens that is computed, in as many whole runs as they need; or each context has blocks for them alone,
    before those of its tokens. Layers with a window also keep their ring of blocks apart.
    Raises ConfigError naming the field.
    """

    block_size: int  # token slots
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES, INT8 or FP8
    num_parts: int = 2  # keys and values; 1: the keys are both
    state_bytes: int = 0  # of recurrent states; num_layers counts the layers with keys and values alone
    state_blocks: int = 0  # in place of these: blocks of its own that a context has for its states
    unlike: tuple[LayerHeads, ...] = ()  # of num_layers, the last, whose heads have other sizes
    ring_layers: int = 0  # beside num_layers, with a window: their keys and values are in rings of `state_blocks`
    ring_blocks: int = 0  # of one ring, which has those of num_layers such layers

    def __post_init__(self) -> None:
        for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.")
        if self.num_parts not in (1, 2):
            raise ConfigError("num_parts must be 1 or 2.")
        if self.dtype not in _CACHE_DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(_CACHE_DTYPE_BYTES)}, not {self.dtype!r}.")
        if self.unlike and (self.has_states or self.num_layers <= sum(heads.num_layers for heads in self.unlike)):
            raise ConfigError("unlike: some layers must be alike, and contexts without states.")
        if self.ring_layers and self.state_blocks != 1 + self.num_rings * self.ring_blocks:
            raise ConfigError("state_blocks must be those of the rings, behind one for their header.")

    @property
    def kinds(self) -> tuple["BlockLayout", ...]:
        """Return one layout for each size of heads, in the order of the layers; mostly one."""
        if not self.unlike:
            return (self,)
        num_first = self.num_layers - sum(heads.num_layers for heads in self.unlike)
        sizes = (LayerHeads(num_first, self.num_kv_heads, self.head_dim), *self.unlike)
        return tuple(replace(self, unlike=(), **size._asdict()) for size in sizes)

    @property
    def kv_width(self) -> int:
        """Number of elements of one token's keys (or values) on one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_int8(self) -> bool:
        """Return whether keys and values are rounded to integers of 8 bits."""
        return self.dtype == INT8

    @property
    def has_scales(self) -> bool:
        """Return whether keys and values are rounded to 8 bits, with a scale for each head of a slot."""
        return self.dtype in (INT8, FP8)

    @property
    def slot_width(self) -> int:
        """Number of elements of one slot on one layer: one token's keys (or values), and scales where they have any."""
        return self.kv_width + (_SCALE_BYTES * self.num_kv_heads if self.has_scales else 0)

    @property
    def run_elements(self) -> int:
        """Number of elements of a block's keys (or values) on one layer: the contiguous run that attention gathers."""
        return self.block_size * self.slot_width

    @property
    def kv_runs(self) -> int:
        """Number of such runs in one block: keys and values of every layer."""
        return self.num_parts * self.num_layers

    @property
    def runs_per_block(self) -> int:
        """Number of runs in one block, including the runs of its states."""
        assert not self.unlike, "runs of several lengths"
        return self.kv_runs + -(-self.state_bytes // (self.run_elements * _CACHE_DTYPE_BYTES[self.dtype]))

    @property
    def kv_elements(self) -> int:
        """Number of elements of one block's keys and values, behind which its states lie."""
        return sum(kind.kv_runs * kind.run_elements for kind in self.kinds)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one block's keys and values."""
        return self.kv_elements * _CACHE_DTYPE_BYTES[self.dtype]

    @property
    def block_elements(self) -> int:
        """Number of elements of one block."""
        return self.kv_elements if self.unlike else self.runs_per_block * self.run_elements

    @property
    def block_bytes(self) -> int:
        return self.block_elements * _CACHE_DTYPE_BYTES[self.dtype]

    @property
    def int8_block_bytes(self) -> int:
        """Bytes of one block's int8 copy (kernels.cache_blocks): one per element, two 16-bit numbers per channel."""
        return self.block_elements + sum(4 * kind.runs_per_block * kind.kv_width for kind in self.kinds)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values on all layers, and of its share in a block's states."""
        return self.block_bytes // self.block_size

    @property
    def has_states(self) -> bool:
        """Return whether contexts have recurrent states, in their blocks or in blocks of their own."""
        return self.state_bytes > 0 or self.state_blocks > 0

    @property
    def num_rings(self) -> int:
        """Number of rings that each context has: of as many layers with a window as a block has layers."""
        return -(-self.ring_layers // self.num_layers)

    @property
    def context_bytes(self) -> int:
        """Bytes of a context's states in blocks of their own, however long it is."""
        return self.state_blocks * self.block_bytes

    def with_own_states(self, num_layers: int, layer_bytes: int) -> "BlockLayout":
        """Return the layout where states have blocks of their own, each with those of some layers behind a header.

        Unchanged where there are none, or a layer's are larger than a block without them.
        """
        plain = replace(self, state_bytes=0)
        num_in_block = max(plain.block_bytes - STATE_HEADER_BYTES, 0) // layer_bytes if layer_bytes else 0
        return replace(plain, state_blocks=-(-num_layers // num_in_block)) if num_in_block else self

    def with_rings(self, num_windowed: int, window: int) -> "BlockLayout":
        """Return the layout where so many of the layers, which read `window` tokens back, keep no more than these.

        Each context has blocks of its own for them, as for states: one whose first bytes say how far it is, and rings,
        in which a token takes the place of the one that has left the window. A block more than the window touches is
        there, so that a block of tokens may be written before the first of them is read.
        """
        assert not self.has_states, "rings beside states"
        assert not self.unlike, "rings of layers that are not alike"
        assert 0 < num_windowed < self.num_layers, "some layers with a window, and some without"
        num_layers, ring_blocks = self.num_layers - num_windowed, -(-window // self.block_size) + 2
        return replace(
            self,
            num_layers=num_layers,
            ring_layers=num_windowed,
            ring_blocks=ring_blocks,
            state_blocks=1 + -(-num_windowed // num_layers) * ring_blocks,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks of a context of so many tokens, those of its states included."""
        return self.state_blocks + -(-num_tokens // self.block_size)

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of the blocks of a context of so many tokens."""
        return self.blocks_for(num_tokens) * self.block_bytes

    def blocks_in(self, memory_bytes: int) -> int:
        """Return the number of blocks that fit into this much memory."""
        return memory_bytes // self.block_bytes

    def digest(self) -> bytes:
        """Return 32 bytes that identify the layout; processes compare them before they share blocks."""
        *fields, num_parts, state_bytes, state_blocks, unlike, ring_layers, ring_blocks = astuple(self)
        fields += [num_parts] if num_parts == 1 or state_bytes or state_blocks else []
        fields += [state_bytes] if state_bytes or state_blocks else []
        fields += [state_blocks] if state_blocks else []
        fields += [tuple(map(tuple, unlike))] if unlike else []
        fields += [("rings", ring_layers, ring_blocks)] if ring_layers else []
        return hashlib.sha256(repr(tuple(fields)).encode()).digest()


def recomputed_blocks(hidden_block_tokens: int, block_size: int) -> int:
    """Return the most blocks of one layer that the recomputed keys and values of one hidden-cache block take."""
    return -(-hidden_block_tokens // block_size)
