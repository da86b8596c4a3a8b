"""GET /: the chat page."""

from fastapi import APIRouter
from starlette.responses import Response

from alignedserve.gateway.routes.html_pages import HtmlPage

router = APIRouter()
_PAGE = HtmlPage.load("page.html")


@router.get("/", response_model=None)
async def page() -> Response:
    """Return the chat page."""
    return _PAGE.response()
