"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from alignedserve.core.request import TokenLogprob
from alignedserve.gateway.openai.held_logprobs import OffsetLogprob
from alignedserve.gateway.openai.prompt_encoding import Prompt
from alignedserve.runtime.model.tokenizer import Tokenizer

# OpenAI's value for "very unlikely"; JSON has no minus infinity.
_LOWEST = -9999.0


def chat_logprobs(logprobs: Sequence[OffsetLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `logprobs` of a chat choice or chunk."""
    return {"content": [_chat_entry(one.logprob, tokenizer) for one in logprobs], "refusal": None}


def completion_logprobs(
    logprobs: Sequence[OffsetLogprob], tokenizer: Tokenizer, *, first_offset: int = 0
) -> dict[str, list[Any]]:
    """Return `logprobs` of a completion choice or chunk."""
    return {
        "tokens": [tokenizer.token_text(one.logprob.token_id) for one in logprobs],
        "token_logprobs": [_finite(one.logprob.logprob) for one in logprobs],
        "top_logprobs": [_top_by_text(one.logprob, tokenizer) for one in logprobs],
        "text_offset": [first_offset + one.text_offset for one in logprobs],
    }


def prompt_logprobs(prompt: Prompt, logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """Return `logprobs` of an echoed prompt, whose first token has none."""
    stream = tokenizer.stream()
    lengths = [len(stream.push((token_id,))) for token_id in prompt.token_ids]
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in prompt.token_ids],
        "token_logprobs": [None, *(_finite(one.logprob) for one in logprobs)],
        "top_logprobs": [None, *(_top_by_text(one, tokenizer) for one in logprobs)],
        "text_offset": list(accumulate(lengths[:-1], initial=0)),
    }


def concatenate(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Concatenate the `logprobs` of two completions."""
    return {name: first[name] + second[name] for name in first}


def _chat_entry(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_token_fields(token_id, logprob, tokenizer) for token_id, logprob in entry.top]
    return _token_fields(entry.token_id, entry.logprob, tokenizer) | {"top_logprobs": top}


def _token_fields(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _top_by_text(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the likeliest tokens and the chosen one. Of two tokens with the same text the likelier is kept."""
    by_text: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        by_text.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return by_text


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
