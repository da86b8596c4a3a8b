"""Makes the prompts of texts and of pairs: the words that a model wants before a text, and how much of it is read."""

from collections.abc import Sequence
from functools import partial

from alignedserve.api.models.model_card import PromptServices
from alignedserve.api.openai.prompt_encoding import Prompt, encode_prompts, param_at
from alignedserve.api.openai.schemas.requests import PromptForms
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.runtime.model.encoder.encoder_config import EmbeddingConfig
from alignedserve.text.tokenizer import EncodedPair

_AS_MANY_AS_FIT = -1
# What sentence-transformers puts before queries and documents, where a model names such prompts.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


async def encode_texts(
    texts: PromptForms,
    services: PromptServices,
    *,
    param: str,
    prompt: str = "",
    truncate_to: int | None = None,
) -> list[Prompt]:
    """Return the prompts of texts, `prompt` before each, or of token ids as they are.

    `truncate_to`: as `truncate_prompt_tokens`. Raises InvalidRequest, ContextTooLong naming `param`.
    """
    check_not_empty(texts, param)
    is_text = isinstance(texts, str) or isinstance(texts[0], str)
    is_whole = truncate_to is None
    prompts = await encode_prompts(_prefixed(texts, prompt), services, param=param, is_bounded=is_whole)
    if truncate_to is not None:
        limit = limit_of(truncate_to, services.model.max_context_len)
        prompts = [await _beginning(one, limit, services, is_text=is_text) for one in prompts]
    return _checked(prompts, services, param)


async def encode_pairs(
    first: Sequence[str],
    second: Sequence[str],
    services: PromptServices,
    *,
    param: str,
    truncate_to: int | None = None,
) -> list[Prompt]:
    """Return the prompts of as many pairs as there are second texts; a single first one is paired with all.

    The first texts are not empty. Raises InvalidRequest, ContextTooLong naming `param`.
    """
    check_not_empty(second, param)
    most = services.config.max_concurrent_requests
    if len(second) > most:
        raise InvalidRequest(f"{param} holds more than {most} texts.", param=param)
    limit = None if truncate_to is None else limit_of(truncate_to, services.model.max_context_len)
    pairs = list(zip(first if len(first) > 1 else [*first] * len(second), second, strict=True))

    def encode() -> list[EncodedPair]:
        return [services.tokenizer.encode_pair(*pair, limit) for pair in pairs]

    encoded = await services.lanes.run(sum(len(one) + len(other) for one, other in pairs), encode)
    prompts = [Prompt(tuple(one.token_ids), text, one.second_at) for one, text in zip(encoded, second, strict=True)]
    return _checked(prompts, services, param)


def check_not_empty(texts: PromptForms | Sequence[str], param: str) -> None:
    if texts == "" or (not isinstance(texts, str) and "" in texts):
        named = param_at(param, [*texts].index(""), of=len(texts)) if texts else param
        raise InvalidRequest(f"{named} must not be an empty text.", param=named)


def prompt_named(embedding: EmbeddingConfig | None, name: str | None) -> str:
    """Return what is put before a text: the prompt of this name, or the default one.

    Raises InvalidRequest listing the names that there are.
    """
    prompts = dict(embedding.prompts) if embedding is not None else {}
    if name is None:
        name = embedding.default_prompt if embedding is not None else None
        return "" if name is None else prompts[name]
    if name not in prompts:
        known = f"not one of {', '.join(prompts)}" if prompts else "not supported: this model has no prompts"
        raise InvalidRequest(f"prompt_name is {known}.", param="prompt_name")
    return prompts[name]


def first_prompt(embedding: EmbeddingConfig | None, names: Sequence[str]) -> str:
    prompts = dict(embedding.prompts) if embedding is not None else {}
    found = next((name for name in names if name in prompts), None)
    return prompt_named(embedding, found)


def limit_of(truncate_to: int, max_context_len: int) -> int:
    """Return the most tokens that `truncate_prompt_tokens` leaves. Raises InvalidRequest."""
    if truncate_to == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or above 0.", param="truncate_prompt_tokens")
    return max_context_len if truncate_to == _AS_MANY_AS_FIT else min(truncate_to, max_context_len)


def _prefixed(texts: PromptForms, prompt: str) -> PromptForms:
    if not prompt:
        return texts
    if isinstance(texts, str):
        return prompt + texts
    return [prompt + text for text in texts] if isinstance(texts[0], str) else texts


async def _beginning(prompt: Prompt, limit: int, services: PromptServices, *, is_text: bool) -> Prompt:
    if len(prompt.token_ids) <= limit:
        return prompt
    if not is_text:
        return Prompt(prompt.token_ids[:limit], prompt.text)
    encode = services.tokenizer.encode_beginning
    token_ids = await services.lanes.run(len(prompt.text), partial(encode, prompt.text, limit))
    return Prompt(tuple(token_ids), prompt.text)


def _checked(prompts: list[Prompt], services: PromptServices, param: str) -> list[Prompt]:
    limit = services.model.max_context_len
    for place, prompt in enumerate(prompts):
        if (length := len(prompt.token_ids)) > limit:
            named = param_at(param, place, of=len(prompts))
            message = f"This model's maximum context length is {limit} tokens. However, {named} has {length}."
            raise ContextTooLong(message, param=named)
    return prompts
