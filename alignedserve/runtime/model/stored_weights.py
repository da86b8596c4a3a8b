"""The weights of a model whose files have them packed, as a worker holds them."""

from dataclasses import dataclass

UNPACKED_TOGETHER = 2  # gates and ups


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of one model in one worker."""

    num_bytes: int
    step_bytes: int  # of the matrices that every token passes; of experts, those of a single token
    description: str  # for people: the types in the files, and those that are unpacked
    warning: str | None = None  # what unpacking costs, where it costs much
    unpacking_bytes: int = 0  # in which a GPU unpacks the widest product for many rows, one at a time
