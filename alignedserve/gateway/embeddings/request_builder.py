"""Builds the requests that compute embeddings: each ends with its prompt."""

import time
from collections.abc import Sequence

from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.gateway.embeddings.schemas import EmbeddingRequest, PromptFields
from alignedserve.gateway.openai.prompt_encoding import Prompt, encode_prompts
from alignedserve.gateway.openai.request_builder import SERVICE_TIERS, Arrival, GenerationRequest
from alignedserve.gateway.openai.schemas.requests import PromptForms
from alignedserve.gateway.openai.slo_headers import parse_slo
from alignedserve.gateway.services import Services

_EMBEDDING = SamplingParams(max_tokens=0, wants_embedding=True)


async def build_embedding_request(asked: EmbeddingRequest, arrival: Arrival, services: Services) -> GenerationRequest:
    """Return the requests of a call of /v1/embeddings. Raises InvalidRequest."""
    if asked.dimensions is not None:
        raise InvalidRequest(
            "dimensions is not supported: this model's embeddings cannot be shortened.",
            param="dimensions",
            code="unsupported_parameter",
        )
    return await build_prompt_request(asked, asked.input, arrival, services, param="input")


async def build_prompt_request(
    asked: PromptFields, texts: PromptForms, arrival: Arrival, services: Services, *, param: str
) -> GenerationRequest:
    """Return the requests that embed these texts, in their order. Raises InvalidRequest naming `param`."""
    services.check_model(asked.model)
    if texts == "" or (isinstance(texts, list) and "" in texts):
        raise InvalidRequest(f"{param} must not hold an empty text.", param=param)
    prompts = await encode_prompts(texts, services, param=param)
    _check_lengths(prompts, services, param)
    tier, slo = SERVICE_TIERS[asked.service_tier], parse_slo(arrival.headers)
    prefix_root = services.prefix_root(arrival.tenant, asked.cache_salt)
    requests = tuple(
        Request(
            request_id=RequestId(f"{arrival.request_id}-{index}"),
            prompt_token_ids=prompt.token_ids,
            sampling=_EMBEDDING,
            reply_to=services.reply_to,
            arrival_s=arrival.arrival_s,
            request_class=tier.request_class,
            slo=slo,
            priority=asked.priority if asked.priority is not None else tier.priority,
            prefix_root=prefix_root,
        )
        for index, prompt in enumerate(prompts)
    )
    return GenerationRequest(
        response_id=f"embd-{arrival.request_id}",
        created=int(time.time()),
        model=services.model.name,
        requests=requests,
        prompts=tuple(prompts),
        stop_strings=(),
        slo=slo,
        service_tier=tier.name,
        is_streamed=False,
        has_logprobs=False,
        includes_usage=False,
        echoes=False,
    )


def _check_lengths(prompts: Sequence[Prompt], services: Services, param: str) -> None:
    longest, limit = max(len(prompt.token_ids) for prompt in prompts), services.model.max_context_len
    if longest > limit:
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, {param} holds a text of {longest}.",
            param=param,
        )
