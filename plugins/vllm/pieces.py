"""Turns a plan's pieces into queues of vLLM's: two lists, one number of tokens, one bound for all.

vLLM lets running requests compute in order, then waiting ones, each as much as is left of the step's tokens. So one
piece may be a part of its prompt for nothing: the last. Further parts take vLLM's bound on the tokens of one request,
where no whole piece is longer; else they sit the step out.
"""

from typing import Any, NamedTuple

from plugins.vllm.names import Layout, adapter_of


class Piece(NamedTuple):
    """A request with the tokens that it computes in the step."""

    request: Any
    num_tokens: int
    is_part: bool  # the prompt goes on
    is_running: bool  # holds memory; False: waits


def arrange(pieces: list[Piece], running: list[Any], first: list[Any], max_loras: int | None) -> Layout:
    """Return the queues for these pieces, in the order of the plan.

    `running`: vLLM's list. `first`: of those, the ones that compute in any case.
    """
    pieces = pieces if max_loras is None else _with_adapters(pieces, max_loras, first)
    most_tokens = 0
    if any(piece.is_part for piece in pieces):
        pieces, most_tokens = _with_parts(pieces)
    chosen = [*first, *[piece.request for piece in pieces if piece.is_running]]
    waiting = [piece.request for piece in pieces if not piece.is_running]
    held = []
    if len(chosen) < len(running):
        ids = {request.request_id for request in chosen}
        held = [request for request in running if request.request_id not in ids]
    num_tokens = sum([piece.num_tokens for piece in pieces])
    if not waiting and max_loras is None and not most_tokens:
        # They compute nothing, as no token is left, but are the first to lose their memory if a chat lacks some.
        return Layout([*chosen, *held], [], [], num_tokens)
    return Layout(chosen, waiting, held, num_tokens, most_tokens)


def _with_parts(pieces: list[Piece]) -> tuple[list[Piece], int]:
    """Return the pieces with the part that goes last at the end, and the bound on the tokens of each; 0: none."""
    has_waiting = not all(piece.is_running for piece in pieces)
    last = next((piece for piece in reversed(pieces) if piece.is_part and piece.is_running != has_waiting), None)
    others = [piece for piece in pieces if piece.is_part and piece is not last]
    whole = [piece for piece in pieces if not piece.is_part]
    longest = max((piece.num_tokens for piece in pieces if not piece.is_part or piece is last), default=0)
    shortest = min((piece.num_tokens for piece in others), default=0)
    is_bound = bool(others) and shortest >= longest
    before = pieces if is_bound else whole
    return [*(piece for piece in before if piece is not last), *([last] if last else [])], shortest if is_bound else 0


def _with_adapters(pieces: list[Piece], max_loras: int, first: list[Any]) -> list[Piece]:
    """Drop pieces whose adapter would be one more than a step may have: vLLM counts those of newcomers alone."""
    loaded = {adapter for request in first if (adapter := adapter_of(request))}
    fitting = []
    for piece in sorted(pieces, key=lambda piece: not piece.is_running):
        adapter = adapter_of(piece.request)
        if not adapter or adapter in loaded or len(loaded) < max_loras:
            fitting.append(piece)
            loaded |= {adapter} if adapter else set()
    return fitting
