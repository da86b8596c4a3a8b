"""The base class of every body that clients may send."""

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    """Strict: no coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
