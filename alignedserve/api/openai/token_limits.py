"""Tokens that an answer may and may not have: `allowed_token_ids` and `bad_words`, with vLLM's meaning."""

from collections.abc import Iterator, Sequence

from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.prompt_encoding import check_token_ids
from alignedserve.api.openai.schemas.requests import GenerationFields
from alignedserve.core.errors import InvalidRequest
from alignedserve.text.tokenizer import Tokenizer


def allowed_token_ids(fields: GenerationFields, services: ModelServices) -> tuple[int, ...]:
    """Return the tokens that may be chosen, each once; empty: all. Raises InvalidRequest."""
    param = "allowed_token_ids"
    allowed = check_token_ids(list(dict.fromkeys(fields.allowed_token_ids)), services, param=param)
    if not fields.min_tokens or not allowed:
        return allowed
    stops = {*fields.stop_token_ids, *(() if fields.ignore_eos else services.model.eos_token_ids)}
    if stops.issuperset(allowed):
        raise InvalidRequest(f"{param} must hold more than end tokens where min_tokens is set.", param=param)
    return allowed


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the words as the tokens that they are at the beginning of a text and after a space."""
    return tuple(dict.fromkeys(token_ids for word in words for token_ids in _forms(word, tokenizer)))


def _forms(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
    if bare:
        yield bare
    if spaced and (not bare or spaced[-len(bare) :] != bare):  # else a space is a token of its own
        yield spaced
