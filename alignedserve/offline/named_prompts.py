"""Errors that say which of several prompts they are about."""

from collections.abc import Iterator
from contextlib import contextmanager

from alignedserve.api.openai.prompt_encoding import param_at
from alignedserve.core.errors import InvalidRequest


@contextmanager
def naming(place: int, *, of: int) -> Iterator[None]:
    """Let an InvalidRequest within name the prompt that it is about, as `prompts[3]`; a single one needs no name."""
    try:
        yield
    except InvalidRequest as error:
        if of > 1:
            error.args = (f"{param_at('prompts', place, of=of)}: {error}",)
        raise
