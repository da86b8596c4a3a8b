"""Builds the requests that compute embeddings: each ends with its prompt."""

from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.api.embeddings.schemas import EmbeddingRequest, PromptFields, RerankRequest, ScoreRequest
from alignedserve.api.embeddings.text_prompts import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    check_not_empty,
    encode_pairs,
    encode_texts,
    first_prompt,
    prompt_named,
)
from alignedserve.api.models.model_card import PromptServices
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation_request import Arrival, CallTerms, GenerationRequest
from alignedserve.api.openai.prompt_encoding import Prompt, Prompts
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import SamplingParams, Slo
from alignedserve.runtime.model.encoder.encoder_config import EmbeddingConfig, EncoderConfig

_EMBEDDING = SamplingParams(max_tokens=0, wants_embedding=True)


class PairSides(NamedTuple):
    """Texts that are compared: one with all second ones, or each with its own."""

    first: list[str]
    second: list[str]
    first_param: str  # the field that mistakes in the first ones are told of
    param: str  # likewise in the second ones, and in pairs
    first_prompts: Sequence[str] = ()  # names of prompts for models that have such, the best first; none: the default
    second_prompts: Sequence[str] = ()

    @classmethod
    def of(cls, asked: ScoreRequest | RerankRequest) -> "PairSides":
        """Return the texts of a body. Raises InvalidRequest unless they make pairs."""
        if isinstance(asked, RerankRequest):
            return cls([asked.query], asked.documents, "query", "documents", QUERY_PROMPTS, DOCUMENT_PROMPTS)
        if len(asked.text_1) not in (1, len(asked.text_2)):
            raise InvalidRequest("text_1 must be one text, or as many as text_2 has.", param="text_1")
        return cls(asked.text_1, asked.text_2, "text_1", "text_2")


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
    asked: ScoreRequest | RerankRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests that compare texts. `prompts`: None: they are made here. Raises InvalidRequest."""
    return _built(asked, prompts or await pair_prompts(asked, services), arrival, services)


async def pair_prompts(asked: ScoreRequest | RerankRequest, services: PromptServices) -> Prompts:
    """Return the prompts that compare texts: a cross-encoder's one per pair, else one per text, second ones last.

    Raises InvalidRequest.
    """
    sides, encoder, truncate_to = PairSides.of(asked), services.model.encoder, asked.truncate_prompt_tokens
    param = sides.param
    check_not_empty(sides.first, sides.first_param)
    if encoder is not None and encoder.score is not None:
        return tuple(await encode_pairs(sides.first, sides.second, services, param=param, truncate_to=truncate_to))
    embedding, prompts = _embedding_of(services), list[Prompt]()
    if len(sides.first) + len(sides.second) > services.config.max_concurrent_requests:
        most = services.config.max_concurrent_requests
        raise InvalidRequest(f"{param} holds more than {most} texts.", param=param)
    for texts, of_side, names in (
        (sides.first, sides.first_param, sides.first_prompts),
        (sides.second, sides.param, sides.second_prompts),
    ):
        prompt = first_prompt(embedding, names)
        prompts += await encode_texts(texts, services, param=of_side, prompt=prompt, truncate_to=truncate_to)
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
    terms = CallTerms.of(asked, arrival, services)._replace(default=Slo())  # nobody reads as they come
    return GenerationRequest(
        response_id=f"embd-{arrival.request_id}",
        arrival=arrival,
        model=services.model.name,
        requests=tuple(terms.request(index, prompt, _EMBEDDING) for index, prompt in enumerate(prompts)),
        prompts=tuple(prompts),
        service_tier=terms.tier.name,
        named_slo=terms.slo,
    )
