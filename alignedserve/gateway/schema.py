"""The base class of every body that clients may send."""

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    """Strict: no coercion. Unknown fields are kept aside, for `parse` to refuse or to name."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
