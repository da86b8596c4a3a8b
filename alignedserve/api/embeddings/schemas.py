"""Bodies of /v1/embeddings, /v1/score and /v1/rerank."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from alignedserve.api.openai.schemas.requests import (
    MAX_CACHE_SALT_LEN,
    PromptForms,
    ServiceTierName,
    checked_prompt,
)
from alignedserve.api.schema import Priority, Schema

_TEXT_FORMS = "must be a string or a list of strings, not empty"
_DOCUMENT_FORMS = f'{_TEXT_FORMS}; in the place of a string may stand {{"text": "..."}}'


def _checked_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and all(type(text) is str for text in texts):
        return texts
    raise ValueError(_TEXT_FORMS)


def _checked_documents(value: Any) -> list[str]:
    if isinstance(value, list):
        value = [one["text"] if isinstance(one, dict) and one.keys() == {"text"} else one for one in value]
    try:
        return _checked_texts(value)
    except ValueError:
        raise ValueError(_DOCUMENT_FORMS) from None


_Texts = Annotated[list[str], PlainValidator(_checked_texts)]
_Documents = Annotated[list[str], PlainValidator(_checked_documents)]


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
    """POST /v1/score: one text against one or several, or as many pairs as there are texts."""

    text_1: _Texts
    text_2: _Texts


class RerankRequest(PromptFields):
    """POST /v1/rerank."""

    query: str
    documents: _Documents
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = True
