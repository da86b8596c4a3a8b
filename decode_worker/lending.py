"""What an elastic worker lends to others."""

from typing import NamedTuple


class Lending(NamedTuple):
    """Memory that an elastic worker lends to others of its node."""

    buffer_bytes: int
    peers: tuple[str, ...]  # as planned
