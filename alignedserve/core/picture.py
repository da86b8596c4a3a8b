"""A picture in a request: a span, or several, of prompt positions whose inputs come from an encoder."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core.errors import InvalidRequest

DIGEST_BYTES = 32
MAX_PICTURES = 64
MAX_PICTURE_BYTES = 32 << 20  # of all pictures of a request
MAX_PIXELS = 1 << 26  # of one picture
_KEY_BYTES = 15
_KEY_BIT = 1 << (8 * _KEY_BYTES)  # above every token's id, and below what packed tokens hold

PictureRun = tuple[int, int]  # the first position, and how many follow one another


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: the file from the client, and its places in the prompt."""

    content: bytes  # of a file that a gateway has decoded once; workers decode it again
    digest: bytes  # of the content
    runs: tuple[PictureRun, ...]  # ascending; the tokens there tell nothing of what it shows
    grid: tuple[int, int] | None = None  # rows and columns of its tokens, for models whose positions know them
    is_whole: bool = False  # the tokens of a run read one another both ways, so that one pass computes all of them
    num_encoder_tokens: int = 0  # what its encoder's pass costs, in prompt tokens; 0: it is not known

    def __post_init__(self) -> None:
        _require(len(self.digest) == DIGEST_BYTES, "have a digest of another length")
        at = 0
        for first, count in self.runs:
            _require(first >= at and count > 0, "stand in no order")
            at = first + count
        _require(bool(self.runs), "stand nowhere")
        _require(self.num_encoder_tokens >= 0, "cost less than nothing")
        if self.grid is not None:
            _require(len(self.runs) == 1 and self.grid[0] * self.grid[1] == self.num_tokens, "have another grid")

    @property
    def num_tokens(self) -> int:
        """Number of its positions."""
        return sum(count for _, count in self.runs)

    @property
    def positions(self) -> list[int]:
        """Its positions in the prompt, ascending."""
        return [position for first, count in self.runs for position in range(first, first + count)]


def picture_digest(content: bytes) -> bytes:
    """Return the digest of a picture's file."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, person=b"picture").digest()


def check_pictures(pictures: Sequence[Picture], prompt_len: int) -> None:
    """Raise InvalidRequest unless the pictures follow one another inside the prompt, and are not too many."""
    at = 0
    for picture in pictures:
        _require(picture.runs[0][0] >= at, "stand in no order")
        at = sum(picture.runs[-1])
    _require(at <= prompt_len, "stand outside the prompt")
    _require(len(pictures) <= MAX_PICTURES, "are too many")
    _require(sum(len(picture.content) for picture in pictures) <= MAX_PICTURE_BYTES, "are too large together")


def with_picture_keys(token_ids: tuple[int, ...], pictures: Sequence[Picture]) -> tuple[int, ...]:
    """Return the tokens with numbers in place of those of pictures, by which cached blocks are told apart.

    A number is made of the picture's digest and of the position inside the picture, and is no token's id.
    """
    if not pictures:
        return token_ids
    keys = list(token_ids)
    for picture in pictures:
        first_key = _KEY_BIT | int.from_bytes(picture.digest[:_KEY_BYTES], "little")
        for index, position in enumerate(picture.positions):
            keys[position] = first_key + index
    return tuple(keys)


def whole_runs(pictures: Sequence[Picture]) -> tuple[PictureRun, ...]:
    """Return the runs of a prompt whose tokens read one another both ways."""
    return tuple(run for picture in pictures if picture.is_whole for run in picture.runs)


def settled_len(runs: Sequence[PictureRun], num_tokens: int) -> int:
    """Return how many of the first `num_tokens` tokens of a context can be computed, or are, if no more are computed.

    `runs`: those of which one pass computes all tokens, or none.
    """
    for first, count in runs:
        if first < num_tokens < first + count:
            return first
    return num_tokens


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"The pictures {problem}.", param="messages")
