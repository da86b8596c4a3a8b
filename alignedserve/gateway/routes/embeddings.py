"""POST /v1/embeddings, /v1/score and /v1/rerank."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.embeddings.request_builder import PairSides, build_embedding_request, build_score_request
from alignedserve.api.embeddings.response_format import (
    EmbeddingFormatter,
    RerankFormatter,
    ScoreFormatter,
    ScoreReader,
)
from alignedserve.api.embeddings.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from alignedserve.api.embeddings.vectors import computed_scores, cosines
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.parsing import parse
from alignedserve.gateway.long_bodies.messages import Kind
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services
from alignedserve.gateway.routes.generate import arrival_of
from alignedserve.gateway.routes.request_bodies import read_prompts
from alignedserve.gateway.streaming import BodyResponse

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def create_embeddings(http: Request) -> Response:
    """Return a vector per text."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    ignored = ignored_fields_of(http)
    check = partial(parse, EmbeddingRequest, ignored=ignored)
    asked, prompts = await read_prompts(http, Kind.EMBEDDING, services, check, ignored)
    model = model_of(http, asked.model)
    request = await build_embedding_request(asked, arrival, model, prompts)
    make_formatter = partial(EmbeddingFormatter, encoding_format=asked.encoding_format, dimensions=asked.dimensions)
    return BodyResponse(Generation(request, model), make_formatter)


@router.post("/v1/score", response_model=None)
async def create_scores(http: Request) -> Response:
    """Return how alike texts are: a cross-encoder's scores, or the cosines of their vectors."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    ignored = ignored_fields_of(http)
    check = partial(parse, ScoreRequest, ignored=ignored)
    asked, prompts = await read_prompts(http, Kind.SCORE, services, check, ignored)
    sides, model = PairSides.of_scores(asked), model_of(http, asked.model)
    request = await build_score_request(asked, sides, arrival, model, prompts)
    return BodyResponse(
        Generation(request, model), partial(ScoreFormatter, read_scores=_score_reader(model, len(sides.second)))
    )


@router.post("/v1/rerank", response_model=None)
async def rerank(http: Request) -> Response:
    """Return documents in the order of their scores with a query."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    ignored = ignored_fields_of(http)
    check = partial(parse, RerankRequest, ignored=ignored)
    asked, prompts = await read_prompts(http, Kind.RANKING, services, check, ignored)
    sides, model = PairSides.of_ranking(asked), model_of(http, asked.model)
    request = await build_score_request(asked, sides, arrival, model, prompts)
    make_formatter = partial(RerankFormatter, read_scores=_score_reader(model, len(asked.documents)), asked=asked)
    return BodyResponse(Generation(request, model), make_formatter)


def _score_reader(services: ModelServices, num_second: int) -> ScoreReader:
    encoder = services.model.encoder
    if encoder is not None and encoder.score is not None:
        return computed_scores
    return partial(cosines, num_second=num_second)
