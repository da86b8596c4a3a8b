"""Log-probabilities in OpenAI's two shapes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from alignedserve.core.request import TokenLogprob
from alignedserve.gateway.openai.choice_decoder import ShownToken
from alignedserve.gateway.openai.request_builder import Prompt
from alignedserve.runtime.model.tokenizer import Tokenizer

# OpenAI's value for "very unlikely"; JSON has no minus infinity.
_LOWEST = -9999.0


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice or chunk."""
    return {"content": [_chat_entry(token.logprob, tokenizer) for token in tokens], "refusal": None}


def completion_logprobs(
    tokens: Sequence[ShownToken], tokenizer: Tokenizer, *, first_offset: int = 0
) -> dict[str, list[Any]]:
    """`logprobs` of a completion choice or chunk."""
    return {
        "tokens": [tokenizer.token_text(token.logprob.token_id) for token in tokens],
        "token_logprobs": [_finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_top_by_text(token.logprob, tokenizer) for token in tokens],
        "text_offset": [first_offset + token.text_offset for token in tokens],
    }


def prompt_logprobs(prompt: Prompt, scores: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """The same for an echoed prompt, whose first token has no log-probability."""
    stream = tokenizer.stream()
    lengths = [len(stream.push((token_id,))) for token_id in prompt.token_ids]
    return {
        "tokens": [tokenizer.token_text(token_id) for token_id in prompt.token_ids],
        "token_logprobs": [None, *(_finite(score.logprob) for score in scores)],
        "top_logprobs": [None, *(_top_by_text(score, tokenizer) for score in scores)],
        "text_offset": list(accumulate(lengths[:-1], initial=0)),
    }


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two completion logprobs, one after the other."""
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
    """The likeliest tokens and the chosen one. Of two tokens that look alike the likelier is shown."""
    by_text: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        by_text.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return by_text


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
