"""The base class of every body that clients may send, and the fields that several kinds of them have."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from alignedserve.api.conversation import ToolChoice
from alignedserve.core.request import MAX_PRIORITY

_MAX_METADATA = 16

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]  # smaller goes first
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=_MAX_METADATA)]


class Schema(BaseModel):
    """Strict: no coercion. Unknown fields are kept aside, for `parse` to refuse or to name."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


IGNORED_FIELDS_HEADER = b"x-alignedserve-ignored-fields"
_MAX_NAMES = 32
_INDEX = re.compile(r"\[\d+\]")

Location = tuple[int | str, ...]


class IgnoredFields:
    """The names of ignored fields, such as `seed_text` or `messages[].mood`: each once, up to a limit."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, path: str) -> None:
        """Add a field by its path; all items of a list count as one."""
        if len(self._names) <= _MAX_NAMES:
            self._names[_INDEX.sub("[]", path)] = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names in the order of the body; the last one is `...` where there are more."""
        names = tuple(self._names)
        return names if len(names) <= _MAX_NAMES else (*names[:_MAX_NAMES], "...")

    def as_header(self) -> tuple[bytes, bytes] | None:
        """Return the header that names the fields; None without any."""
        return (IGNORED_FIELDS_HEADER, ", ".join(self.names).encode("ascii", "replace")) if self._names else None


def unknown_fields(body: Schema) -> Iterator[Location]:
    """Yield the location of every field of a parsed body that its schema does not have. Unset (null) ones count not."""
    for name, value in (body.model_extra or {}).items():
        if value is not None:
            yield (name,)
    for name, value in body.__dict__.items():
        if isinstance(value, Schema):
            yield from ((name, *rest) for rest in unknown_fields(value))
        elif isinstance(value, ToolChoice):
            yield from ((name, *rest) for rest in value.unknown)
        # Lists are of one kind; token ids are not worth a look each.
        elif isinstance(value, Sequence) and value and isinstance(value[0], Schema):
            yield from _in_list(name, value)


def _in_list(name: str, items: Sequence[Schema]) -> Iterator[Location]:
    for index, item in enumerate(items):
        yield from ((name, index, *rest) for rest in unknown_fields(item))
