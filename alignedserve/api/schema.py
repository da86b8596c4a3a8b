"""The base class of every body that clients may send, and the fields that several kinds of them have."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from alignedserve.core.request import MAX_PRIORITY

_MAX_METADATA = 16

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]  # smaller goes first
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=_MAX_METADATA)]


class Schema(BaseModel):
    """Strict: no coercion. Unknown fields are kept aside, for `parse` to refuse or to name."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
