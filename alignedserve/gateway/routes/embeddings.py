"""POST /v1/embeddings, /v1/score and /v1/rerank."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.embeddings.request_builder import build_embedding_request, build_prompt_request
from alignedserve.gateway.embeddings.response_format import EmbeddingFormatter, RerankFormatter, ScoreFormatter
from alignedserve.gateway.embeddings.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from alignedserve.gateway.openai.generation import Generation
from alignedserve.gateway.openai.parsing import parse, read_json
from alignedserve.gateway.openai.streaming import BodyResponse
from alignedserve.gateway.routes.dependencies import ignored_fields_of, rate_limited_services
from alignedserve.gateway.routes.generate import arrival_of

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def create_embeddings(http: Request) -> Response:
    """Return a vector per text."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    asked = parse(EmbeddingRequest, await read_json(http, services.config), ignored_fields_of(http))
    request = await build_embedding_request(asked, arrival, services)
    make_formatter = partial(EmbeddingFormatter, encoding_format=asked.encoding_format)
    return BodyResponse(Generation(request, services), make_formatter)


@router.post("/v1/score", response_model=None)
async def create_scores(http: Request) -> Response:
    """Return how alike texts are: the cosines of their vectors."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    asked = parse(ScoreRequest, await read_json(http, services.config), ignored_fields_of(http))
    first, second = asked.text_1, asked.text_2
    if len(first) not in (1, len(second)):
        raise InvalidRequest("text_1 must be one text, or as many as text_2 has.", param="text_1")
    request = await build_prompt_request(asked, first + second, arrival, services, param="text_2")
    return BodyResponse(Generation(request, services), partial(ScoreFormatter, num_second=len(second)))


@router.post("/v1/rerank", response_model=None)
async def rerank(http: Request) -> Response:
    """Return documents in the order of their likeness to a query."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    asked = parse(RerankRequest, await read_json(http, services.config), ignored_fields_of(http))
    texts = [asked.query, *asked.documents]
    request = await build_prompt_request(asked, texts, arrival, services, param="documents")
    return BodyResponse(Generation(request, services), partial(RerankFormatter, asked=asked))
