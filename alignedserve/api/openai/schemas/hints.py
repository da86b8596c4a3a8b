"""Fields of OpenAI's APIs that never change an answer: checked, as mistakes should show, but without effect."""

from typing import Any, Literal

from pydantic import Field

from alignedserve.api.schema import Metadata, Schema


class Prediction(Schema):
    """The answer that the client expects; other servers generate faster where it is right."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class PromptCacheOptions(Schema):
    """How a prompt is cached. Here every prompt is, for as long as there is space."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None


class Hints(Schema):
    """Fields about the end user, about what to keep, and about how to be fast or brief."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: Metadata = Field(default_factory=dict)
    store: bool = False  # chat completions are never stored
    prompt_cache_key: str | None = None  # the prefix cache finds equal beginnings by itself
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prediction: Prediction | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a wish that only models trained for it know
