"""Builds the requests that compute embeddings: each ends with its prompt."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.api.embeddings.schemas import EmbeddingRequest, PromptFields, RerankRequest, ScoreRequest
from alignedserve.api.embeddings.text_prompts import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    encode_pairs,
    encode_texts,
    first_prompt,
    prompt_named,
)
from alignedserve.api.models.chat_model import PromptServices
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.prompt_encoding import Prompt, Prompts
from alignedserve.api.openai.request_builder import SERVICE_TIERS, Arrival, GenerationRequest
from alignedserve.api.openai.slo_headers import parse_slo
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.runtime.model.encoder.encoder_config import EmbeddingConfig, EncoderConfig

_EMBEDDING = SamplingParams(max_tokens=0, wants_embedding=True)


class PairSides(NamedTuple):
    """Texts that are compared: one with all second ones, or each with its own."""

    first: list[str]
    second: list[str]
    param: str  # the field that mistakes in them are told of
    first_prompts: Sequence[str] = ()  # names of prompts for models that have such, the best first; none: the default
    second_prompts: Sequence[str] = ()

    @classmethod
    def of_scores(cls, asked: ScoreRequest) -> "PairSides":
        """Return the texts of a call of /v1/score. Raises InvalidRequest unless they make pairs."""
        if len(asked.text_1) not in (1, len(asked.text_2)):
            raise InvalidRequest("text_1 must be one text, or as many as text_2 has.", param="text_1")
        return cls(asked.text_1, asked.text_2, "text_2")

    @classmethod
    def of_ranking(cls, asked: RerankRequest) -> "PairSides":
        """Return the texts of a call of /v1/rerank."""
        return cls([asked.query], asked.documents, "documents", QUERY_PROMPTS, DOCUMENT_PROMPTS)


async def build_embedding_request(
    asked: EmbeddingRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests of a call of /v1/embeddings. `prompts`: None: they are made here. Raises InvalidRequest."""
    return _built(asked, prompts or await embedding_prompts(asked, services), arrival, services)


async def embedding_prompts(asked: EmbeddingRequest, services: PromptServices) -> Prompts:
    """Return the prompts of a call of /v1/embeddings, of one that its model can answer. Raises InvalidRequest."""
    embedding = _embedding_of(services)
    check_dimensions(asked.dimensions, services.model.encoder)
    prompt = prompt_named(embedding, asked.prompt_name)
    prompts = await encode_texts(
        asked.input, services, param="input", prompt=prompt, truncate_to=asked.truncate_prompt_tokens
    )
    return tuple(prompts)


async def build_score_request(
    asked: PromptFields, sides: PairSides, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests that compare texts. `prompts`: None: they are made here. Raises InvalidRequest."""
    return _built(asked, prompts or await pair_prompts(asked, sides, services), arrival, services)


async def pair_prompts(asked: PromptFields, sides: PairSides, services: PromptServices) -> Prompts:
    """Return the prompts that compare texts: a cross-encoder's one per pair, else one per text, second ones last.

    Raises InvalidRequest.
    """
    encoder, truncate_to, param = services.model.encoder, asked.truncate_prompt_tokens, sides.param
    if encoder is not None and encoder.score is not None:
        return tuple(await encode_pairs(sides.first, sides.second, services, param=param, truncate_to=truncate_to))
    embedding, prompts = _embedding_of(services), list[Prompt]()
    if len(sides.first) + len(sides.second) > services.config.max_concurrent_requests:
        most = services.config.max_concurrent_requests
        raise InvalidRequest(f"{param} holds more than {most} texts.", param=param)
    for texts, names in ((sides.first, sides.first_prompts), (sides.second, sides.second_prompts)):
        prompt = first_prompt(embedding, names)
        prompts += await encode_texts(texts, services, param=param, prompt=prompt, truncate_to=truncate_to)
    return tuple(prompts)


def check_dimensions(dimensions: int | None, encoder: EncoderConfig | None) -> None:
    """Raise InvalidRequest unless the model's vectors may be cut to this many dimensions; None: they are not cut."""
    if dimensions is None:
        return
    if encoder is None or not encoder.embedding.is_matryoshka:
        raise InvalidRequest(
            "dimensions is not supported: this model's embeddings cannot be shortened.",
            param="dimensions",
            code="unsupported_parameter",
        )
    trained = encoder.embedding.dimensions
    if dimensions > encoder.vector_width or (trained and dimensions not in (*trained, encoder.vector_width)):
        known = f"one of {', '.join(map(str, trained))}" if trained else f"at most {encoder.vector_width}"
        raise InvalidRequest(f"dimensions must be {known}.", param="dimensions")


def _embedding_of(services: PromptServices) -> EmbeddingConfig | None:
    """Return how the model makes vectors of texts; None: as decoders do. Raises InvalidRequest if it makes none."""
    encoder = services.model.encoder
    if encoder is None:
        return None
    if encoder.score is not None:
        raise InvalidRequest(
            "This model scores pairs of texts and has no vectors; it serves /v1/score and /v1/rerank.",
            param="model",
            code="unsupported_model",
        )
    return encoder.embedding


def _built(
    asked: PromptFields, prompts: Sequence[Prompt], arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    tier, slo = SERVICE_TIERS[asked.service_tier], parse_slo(arrival.headers)
    prefix_root = services.prefix_root(arrival.tenant, asked.cache_salt)
    requests = tuple(
        Request(
            request_id=RequestId(f"{arrival.request_id}-{index}"),
            prompt_token_ids=prompt.token_ids,
            second_text_at=prompt.second_text_at,
            sampling=_EMBEDDING,
            reply_to=services.reply_to,
            arrival_s=arrival.arrival_s,
            request_class=tier.request_class,
            slo=slo,
            priority=asked.priority if asked.priority is not None else tier.priority,
            prefix_root=prefix_root,
            adapter=services.adapter,
        )
        for index, prompt in enumerate(prompts)
    )
    return GenerationRequest(
        response_id=f"embd-{arrival.request_id}",
        arrival=arrival,
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
