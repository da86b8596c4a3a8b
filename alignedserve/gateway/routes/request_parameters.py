"""Query parameters and headers that routes read, and pages of items."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from alignedserve.api.responses.items import Item
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.call import Call

_DEFAULT_ITEMS, _MAX_ITEMS = 20, 100  # of a page
_RANGE = re.compile(r"bytes=(\d{1,15})-", re.ASCII)


class ItemPage(NamedTuple):
    """The part of a list that a client asks for."""

    after: str | None  # id of the item before it; None: it begins the list
    limit: int
    newest_first: bool


def positive(call: Call, name: str, *, default: int, at_most: int) -> int:
    """Return a number from 1 to `at_most`. Raises InvalidRequest."""
    text = call.http.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not 1 <= int(text) <= at_most:
        raise InvalidRequest(f"{name} must be between 1 and {at_most}.", param=name, code="invalid_value")
    return int(text)


def number(call: Call, name: str, *, default: int) -> int:
    """Return a number that is not negative. Raises InvalidRequest."""
    text = call.http.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise InvalidRequest(f"{name} must be a number.", param=name, code="invalid_value")
    return int(text)


def one_of(call: Call, name: str, known: Sequence[str]) -> str:
    """Return one of the known values, the first when unset. Raises InvalidRequest."""
    text = call.http.query_params.get(name, known[0])
    if text not in known:
        raise InvalidRequest(f"{name} must be one of {', '.join(known)}.", param=name, code="invalid_value")
    return text


def item_page(call: Call) -> ItemPage:
    """Return the part of a list of items that `after`, `limit` and `order` ask for. Raises InvalidRequest."""
    return ItemPage(
        after=call.http.query_params.get("after"),
        limit=positive(call, "limit", default=_DEFAULT_ITEMS, at_most=_MAX_ITEMS),
        newest_first=one_of(call, "order", ("desc", "asc")) == "desc",
    )


def first_byte(call: Call) -> int | None:
    """Return the first byte that `Range: bytes=N-` asks for, to resume a download (RFC 9110, section 14).

    None without a range, or with one of another form, which may be ignored.
    """
    match = _RANGE.fullmatch(call.http.headers.get("range", "").strip())
    return int(match[1]) if match else None


def page_of(
    items: Sequence[Item], page: ItemPage, deleted: Mapping[str, int] = MappingProxyType({})
) -> tuple[list[Item], bool]:
    """Return a page of items, and whether there are more. Raises InvalidRequest.

    `items`: oldest first. `deleted`: how many of them were before each that is not there any more.
    """
    ordered = list(reversed(items)) if page.newest_first else list(items)
    ids = [item["id"] for item in ordered]
    if page.after is None:
        first = 0
    elif page.after in ids:
        first = ids.index(page.after) + 1
    elif page.after in deleted:
        first = len(items) - deleted[page.after] if page.newest_first else deleted[page.after]
    else:
        raise InvalidRequest("after is not the id of an item in this list.", param="after")
    return ordered[first : first + page.limit], len(ordered) > first + page.limit
