"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import orjson

from alignedserve.api.openai.choice_decoder import OffsetLogprob
from alignedserve.api.openai.prompt_encoding import Prompt
from alignedserve.core.request import TokenLogprob
from alignedserve.text.tokenizer import Tokenizer


class TokenNames(Protocol):
    """Texts and bytes of tokens, as log-probabilities show them. A Tokenizer is one."""

    def token_text(self, token_id: int) -> str:
        """Return the token's text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes."""


class TokenIdNames:
    """Names tokens by their ids, which are distinct where texts are not. Implements TokenNames."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = tokenizer.token_bytes

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


# OpenAI's value for "very unlikely"; JSON has no minus infinity.
_LOWEST = -9999.0


def chat_logprobs(logprobs: Sequence[OffsetLogprob], names: TokenNames) -> dict[str, Any]:
    return {"content": encoded(_chat_entry(one.logprob, names) for one in logprobs), "refusal": None}


def completion_logprobs(
    logprobs: Sequence[OffsetLogprob], names: TokenNames, *, first_offset: int = 0
) -> dict[str, list[Any]]:
    return {
        "tokens": [names.token_text(one.logprob.token_id) for one in logprobs],
        "token_logprobs": [_finite(one.logprob.logprob) for one in logprobs],
        "top_logprobs": encoded(_top_by_text(one.logprob, names) for one in logprobs),
        "text_offset": [first_offset + one.text_offset for one in logprobs],
    }


def echoed_logprobs(
    prompt: Prompt, logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, names: TokenNames
) -> dict[str, list[Any]]:
    return {
        "tokens": [names.token_text(token_id) for token_id in prompt.token_ids],
        "token_logprobs": [None, *(_finite(one.logprob) for one in logprobs)],
        "top_logprobs": [None, *encoded(_top_by_text(one, names) for one in logprobs)],
        "text_offset": _prompt_offsets(prompt, tokenizer),
    }


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob], num_top: int, tokenizer: Tokenizer
) -> list[orjson.Fragment | None]:
    """Return vLLM's `prompt_logprobs`: of each prompt token, by its id, its own and those of the likeliest."""
    return [None, *encoded(_by_id(one, num_top, tokenizer) for one in logprobs)]


def encoded(entries: Iterable[Any]) -> list[orjson.Fragment]:
    """Return entries as they stand in a body: no more than one at a time is held as objects.

    Else a collection of garbage looks at millions of them, and encoding them at once lets no other thread run.
    """
    return [orjson.Fragment(orjson.dumps(entry)) for entry in entries]


def concatenate(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: first[name] + second[name] for name in first}


def _prompt_offsets(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return where each token begins in the prompt's text.

    A special token has no length where it was added to the text, or left out of one that was made of token ids.
    """
    stream, place = tokenizer.stream(), 0
    offsets = []
    for token_id in prompt.token_ids:
        offsets.append(place)
        length, name = len(stream.push((token_id,))), tokenizer.token_text(token_id)
        is_spelled = tokenizer.is_special(token_id) and prompt.text.startswith(name, place)
        place += len(name) if is_spelled else length
    return offsets


def _chat_entry(entry: TokenLogprob, names: TokenNames) -> dict[str, Any]:
    top = [_token_fields(token_id, logprob, names) for token_id, logprob in entry.top]
    return _token_fields(entry.token_id, entry.logprob, names) | {"top_logprobs": top}


def _token_fields(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(names.token_bytes(token_id)),
    }


def _top_by_text(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    by_text: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        by_text.setdefault(names.token_text(token_id), _finite(logprob))
    return by_text


def _by_id(entry: TokenLogprob, num_top: int, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, place) for place, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
    by_id: dict[str, dict[str, Any]] = {}
    for token_id, logprob, rank in ranked:
        shown = {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        by_id.setdefault(str(token_id), shown)
    return by_id


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
