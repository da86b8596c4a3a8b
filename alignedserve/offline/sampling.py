"""How prompts of the Python API are sampled: checked like what comes by a link, before anything is computed."""

from collections.abc import Sequence
from dataclasses import fields

import msgspec

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import SamplingParams

Samplings = SamplingParams | Sequence[SamplingParams] | None  # for all prompts, or one for each; None: greedily


def samplings_of(asked: Samplings, count: int) -> list[SamplingParams | None]:
    """Return how each of `count` prompts is sampled, in the fields' own types. Raises InvalidRequest."""
    if asked is None:
        return [None] * count
    if isinstance(asked, SamplingParams):
        return [_in_own_types(asked)] * count
    if not isinstance(asked, Sequence) or not all(isinstance(one, SamplingParams) for one in asked):
        raise InvalidRequest("sampling must be SamplingParams, or a list of them", param="sampling")
    if len(asked) != count:
        raise InvalidRequest("sampling must be one, or one for each prompt", param="sampling")
    return list(map(_in_own_types, asked))


def _in_own_types(sampling: SamplingParams) -> SamplingParams:
    given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    try:
        return msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling: {error}", param="sampling") from None
