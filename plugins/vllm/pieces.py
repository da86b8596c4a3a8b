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
    pieces = _with_adapters(pieces, max_loras, first)
    here = [piece for piece in pieces if piece.is_running]
    waiting = [piece for piece in pieces if not piece.is_running]
    most_tokens = 0
    parts = [piece for piece in pieces if piece.is_part]
    if parts:
        last = _last_of(waiting if waiting else here)
        others = [piece for piece in parts if piece is not last]
        longest = max((piece.num_tokens for piece in pieces if piece not in others), default=0)
        shortest = min((piece.num_tokens for piece in others), default=0)
        if others and shortest >= longest:
            most_tokens = max(shortest, 1)
        elif others:
            here = [piece for piece in here if piece not in others]
            waiting = [piece for piece in waiting if piece not in others]
        here, waiting = _at_end(here, last), _at_end(waiting, last)
    chosen = [*first, *(piece.request for piece in here)]
    ids = {request.request_id for request in chosen}
    held = [request for request in running if request.request_id not in ids] if len(ids) < len(running) else []
    num_tokens = sum(piece.num_tokens for piece in here) + sum(piece.num_tokens for piece in waiting)
    if not waiting and max_loras is None and not most_tokens:
        # They compute nothing, as no token is left, but are the first to lose their memory if a chat lacks some.
        return Layout([*chosen, *held], [], [], num_tokens)
    return Layout(chosen, [piece.request for piece in waiting], held, num_tokens, most_tokens)


def _last_of(pieces: list[Piece]) -> Piece | None:
    return next((piece for piece in reversed(pieces) if piece.is_part), None)


def _at_end(pieces: list[Piece], last: Piece | None) -> list[Piece]:
    if last is None or last not in pieces:
        return pieces
    return [*(piece for piece in pieces if piece is not last), last]


def _with_adapters(pieces: list[Piece], max_loras: int | None, first: list[Any]) -> list[Piece]:
    """Drop pieces whose adapter would be one more than a step may have: vLLM counts those of newcomers alone."""
    if max_loras is None:
        return pieces
    loaded = {adapter for request in first if (adapter := adapter_of(request))}
    fitting = []
    for piece in sorted(pieces, key=lambda piece: not piece.is_running):
        adapter = adapter_of(piece.request)
        if not adapter or adapter in loaded or len(loaded) < max_loras:
            fitting.append(piece)
            loaded |= {adapter} if adapter else set()
    return fitting
