"""Pages of items."""

from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.api.responses.items import Item
from alignedserve.core.errors import InvalidRequest


class ItemPage(NamedTuple):
    """The part of a list that a client asks for."""

    after: str | None  # id of the item before it; None: it begins the list
    limit: int
    newest_first: bool


def page_of(items: Sequence[Item], page: ItemPage) -> tuple[list[Item], bool]:
    """Return a page of items, oldest first, and whether there are more. Raises InvalidRequest."""
    ordered = list(reversed(items)) if page.newest_first else list(items)
    ids = [item["id"] for item in ordered]
    if page.after is not None and page.after not in ids:
        raise InvalidRequest("after is not the id of an item in this list.", param="after")
    first = 0 if page.after is None else ids.index(page.after) + 1
    return ordered[first : first + page.limit], len(ordered) > first + page.limit
