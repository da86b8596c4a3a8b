"""Builds the requests that compute embeddings: each ends with its prompt."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, ValidationError

from alignedserve.api.models.model_services import ModelServices, PromptServices
from alignedserve.api.openai.bodies import MAX_CACHE_SALT_LEN, PromptForms, ServiceTierName, checked_prompt
from alignedserve.api.openai.prompt_encoding import Prompt, Prompts, encode_prompts, param_at
from alignedserve.api.openai.request_builder import Arrival, CallTerms, GenerationRequest
from alignedserve.api.schema import Priority, Schema
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.request import SamplingParams, Slo
from alignedserve.runtime.model.encoder.encoder_config import EmbeddingConfig, EncoderConfig
from alignedserve.text.tokenizer import EncodedPair

_TEXT_FORMS = "must be a string or a list of strings, not empty"
_DOCUMENT_FORMS = f'{_TEXT_FORMS}; in the place of a string may stand {{"text": "..."}}'


class Document(Schema):
    """A text to rank."""

    text: str


def _checked_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and all(type(text) is str for text in texts):
        return texts
    raise ValueError(_TEXT_FORMS)


def _checked_documents(value: Any) -> list[Document]:
    values = value if isinstance(value, list) else [value]
    try:
        documents = [Document.model_validate({"text": text} if isinstance(text, str) else text) for text in values]
    except ValidationError:
        documents = []
    if not documents:
        raise ValueError(_DOCUMENT_FORMS)
    return documents


_Texts = Annotated[list[str], PlainValidator(_checked_texts)]
_Documents = Annotated[list[Document], PlainValidator(_checked_documents)]


class PromptFields(Schema):
    """Fields of every body whose prompts are not answered with text."""

    model: str
    service_tier: ServiceTierName = "auto"
    priority: Priority | None = None  # by service_tier when unset
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_LEN)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)  # only the first ones are read; -1: as many as fit
    user: str | None = None  # a hint; it never changes an answer


class EmbeddingRequest(PromptFields):
    """POST /v1/embeddings."""

    input: Annotated[PromptForms, PlainValidator(checked_prompt)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    prompt_name: str | None = None  # an extension: of sentence-transformers' prompts, the one before every text


class ScoreRequest(PromptFields):
    """POST /v1/score: one text against one or several, or pairs of texts."""

    text_1: _Texts
    text_2: _Texts


class RerankRequest(PromptFields):
    """POST /v1/rerank."""

    query: str
    documents: _Documents
    top_n: int | None = Field(None, ge=0)  # 0: all of them
    return_documents: bool = True


_AS_MANY_AS_FIT = -1
# What sentence-transformers puts before queries and documents, where a model names such prompts.
QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


async def encode_texts(
    texts: PromptForms, services: PromptServices, *, param: str, prompt: str = "", truncate_to: int | None = None
) -> list[Prompt]:
    """Return the prompts of texts, `prompt` before each, or of token ids as they are.

    `truncate_to`: as `truncate_prompt_tokens`. Raises InvalidRequest, ContextTooLong naming `param`."""
    check_not_empty(texts, param)
    is_text = isinstance(texts, str) or isinstance(texts[0], str)
    is_whole = truncate_to is None
    prompts = await encode_prompts(_prefixed(texts, prompt), services, param=param, is_bounded=is_whole)
    if truncate_to is not None:
        limit = limit_of(truncate_to, services.model.max_context_len)
        prompts = [await _beginning(text_prompt, limit, services, is_text=is_text) for text_prompt in prompts]
    return _checked(prompts, services, param)


async def encode_pairs(
    first: Sequence[str], second: Sequence[str], services: PromptServices, *, param: str, truncate_to: int | None = None
) -> list[Prompt]:
    """Return the prompts of as many pairs as there are second texts; a single first one is paired with all. The first
    texts are not empty. Raises InvalidRequest, ContextTooLong naming `param`."""
    check_not_empty(second, param)
    most = services.config.max_concurrent_requests
    if len(second) > most:
        raise InvalidRequest(f"{param} holds more than {most} texts.", param=param)
    limit = None if truncate_to is None else limit_of(truncate_to, services.model.max_context_len)
    pairs = list(zip(first if len(first) > 1 else [*first] * len(second), second, strict=True))

    def encode() -> list[EncodedPair]:
        return [services.tokenizer.encode_pair(*pair, limit) for pair in pairs]

    encoded = await services.lanes.run(sum(len(first_item) + len(other) for first_item, other in pairs), encode)
    prompts = [
        Prompt(tuple(first_item.token_ids), text, first_item.second_at)
        for first_item, text in zip(encoded, second, strict=True)
    ]
    return _checked(prompts, services, param)


def check_not_empty(texts: PromptForms | Sequence[str], param: str) -> None:
    if texts == "" or (not isinstance(texts, str) and "" in texts):
        named = param_at(param, [*texts].index(""), of=len(texts)) if texts else param
        raise InvalidRequest(f"{named} must not be an empty text.", param=named)


def prompt_named(embedding: EmbeddingConfig | None, name: str | None) -> str:
    """Return what is put before a text: the prompt of this name, or the default one. Raises InvalidRequest listing the
    names that there are."""
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
    known_name = next((name for name in names if name in prompts), None)
    return prompt_named(embedding, known_name)


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
    for index, prompt in enumerate(prompts):
        if (length := len(prompt.token_ids)) > limit:
            named = param_at(param, index, of=len(prompts))
            message = f"This model's maximum context length is {limit} tokens. However, {named} has {length}."
            raise ContextTooLong(message, param=named)
    return prompts


_EMBEDDING = SamplingParams(temperature=0.0, max_tokens=0, wants_embedding=True)  # nothing is drawn


class PairSides(NamedTuple):
    """Texts to compare: a single first text with every second text, or pair by pair."""

    first: list[str]
    second: list[str]
    first_param: str  # the field that mistakes in the first ones are told of
    param: str  # likewise in the second ones, and in pairs
    first_prompts: Sequence[str] = ()  # names of prompts for models that have such, the best first; none: the default
    second_prompts: Sequence[str] = ()

    @classmethod
    def of(cls, body: ScoreRequest | RerankRequest) -> "PairSides":
        """Return the texts of a body. Raises InvalidRequest unless they make pairs."""
        if isinstance(body, RerankRequest):
            texts = [document.text for document in body.documents]
            return cls([body.query], texts, "query", "documents", QUERY_PROMPTS, DOCUMENT_PROMPTS)
        if len(body.text_1) not in (1, len(body.text_2)):
            raise InvalidRequest("text_1 must be one text, or as many as text_2 has.", param="text_1")
        return cls(body.text_1, body.text_2, "text_1", "text_2")


async def build_embedding_request(
    body: EmbeddingRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests of a call of /v1/embeddings. `prompts`: None: they are made here. Raises InvalidRequest."""
    return _built(body, prompts or await embedding_prompts(body, services), arrival, services)


async def embedding_prompts(body: EmbeddingRequest, services: PromptServices) -> Prompts:
    """Return the prompts of a call of /v1/embeddings, of one that its model can answer. Raises InvalidRequest."""
    embedding = _embedding_of(services)
    check_dimensions(body.dimensions, services.model.encoder)
    prompt = prompt_named(embedding, body.prompt_name)
    prompts = await encode_texts(
        body.input, services, param="input", prompt=prompt, truncate_to=body.truncate_prompt_tokens
    )
    return tuple(prompts)


async def build_score_request(
    body: ScoreRequest | RerankRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests that compare texts. `prompts`: None: they are made here. Raises InvalidRequest."""
    return _built(body, prompts or await pair_prompts(body, services), arrival, services)


async def pair_prompts(body: ScoreRequest | RerankRequest, services: PromptServices) -> Prompts:
    """Return the prompts that compare texts: a cross-encoder's one per pair, else one per text, second ones last.
    Raises InvalidRequest."""
    sides, encoder, truncate_to = PairSides.of(body), services.model.encoder, body.truncate_prompt_tokens
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
    body: PromptFields, prompts: Sequence[Prompt], arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    terms = CallTerms.of(body, arrival, services)._replace(default=Slo())  # nobody reads as they come
    return GenerationRequest(
        response_id=f"embd-{arrival.request_id}",
        arrival=arrival,
        model=services.model.name,
        requests=tuple(terms.request(index, prompt, _EMBEDDING) for index, prompt in enumerate(prompts)),
        prompts=tuple(prompts),
        service_tier=terms.tier.name,
        named_slo=terms.slo,
    )
