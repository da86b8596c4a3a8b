"""`truncation: auto`: as few turns as need be are left out at the beginning of a conversation."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from alignedserve.api.responses.chat_body import num_system_items
from alignedserve.api.responses.items import Item
from alignedserve.core.errors import ContextTooLong

T = TypeVar("T")


async def build_truncated(build: Callable[[Sequence[Item]], Awaitable[T]], items: Sequence[Item]) -> T:
    """Return what is built from most turns, found by halving. Raises ContextTooLong if the last one is too long.

    A turn begins with a message of the user, so that no call loses its output. System messages at the beginning stay.
    """
    num_kept = num_system_items(items)
    starts = [num_kept] + [place for place in range(num_kept + 1, len(items)) if items[place].get("role") == "user"]

    async def build_from(turn: int) -> T:
        return await build([*items[:num_kept], *items[starts[turn] :]])

    try:
        return await build(items)
    except ContextTooLong:
        too_early, fitting = 0, len(starts) - 1
    built = await build_from(fitting)
    while fitting - too_early > 1:
        middle = (too_early + fitting) // 2
        try:
            built, fitting = await build_from(middle), middle
        except ContextTooLong:
            too_early = middle
    return built
