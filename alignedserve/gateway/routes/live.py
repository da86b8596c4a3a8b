"""The chat page, the live page and what it and `alignedserve top` read, and the course of a request."""

import base64
import hashlib
import re
import time
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.errors import NotFound
from alignedserve.api.timelines.timeline import plain_request_id
from alignedserve.batches.records import BatchTotals
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.live.view import live_view
from alignedserve.gateway.routes.dependencies import key_of, overseen_services, rate_limited_services
from alignedserve.gateway.services import Services

router = APIRouter()


@dataclass(frozen=True, slots=True)
class HtmlPage:
    """A page. Its policy allows only its own script and style, and connections to this server."""

    text: str
    headers: dict[str, str]

    @classmethod
    def load(cls, path: str) -> "HtmlPage":
        """Load a file of the gateway's package."""
        text = files("alignedserve.gateway").joinpath(path).read_text(encoding="utf-8")
        policy = (
            f"default-src 'none'; script-src {_hashes(text, 'script')}; style-src {_hashes(text, 'style')}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return cls(text, headers)

    def response(self) -> Response:
        """Return the response of a request for it."""
        return Response(self.text, media_type="text/html; charset=utf-8", headers=self.headers)


def _hashes(text: str, tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_DASHBOARD = HtmlPage.load("live/dashboard.html")


@router.get("/dashboard", response_model=None)
async def dashboard() -> Response:
    """Return the live page, which asks for a key where one is needed."""
    return _DASHBOARD.response()


@router.get("/v1/alignedserve/live", response_model=None)
async def live(http: Request) -> Response:
    """Return what the cluster does at this moment, to a key that may see what all keys use."""
    services = overseen_services(http)
    document = live_view(services, await _batch_totals(services), time.monotonic())
    return JsonResponse(document, headers={"Cache-Control": "no-store"})


async def _batch_totals(services: Services) -> BatchTotals | None:
    files_api = services.files_api
    return None if files_api is None else await files_api.totals.read(files_api.repository)


_PAGE = HtmlPage.load("page.html")


@router.get("/", response_model=None)
async def page() -> Response:
    """Return the chat page."""
    return _PAGE.response()


@router.get("/v1/requests/{wanted}", response_model=None)
@router.get("/v1/alignedserve/requests/{wanted}", response_model=None)
async def explain(http: Request, wanted: str) -> Response:
    """Explain a request by the id of its response, or by the client's own, at whichever gateway it was made.

    Where it waits, with its place in the queue and when it is likely to start.
    """
    services = await rate_limited_services(http)
    document = None
    if plain_request_id(wanted) is not None:
        document = await services.questions.explain(wanted, key_of(http).owner)
    if document is None:
        raise NotFound("There is no such request, or it ended too long ago.", code="request_not_found")
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
