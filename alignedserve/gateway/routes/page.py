"""GET /: the chat page, a single file without external resources."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()


@router.get("/", response_model=None)
async def page() -> Response:
    """Return the chat page. Its policy allows only its own script and style, and connections to this server."""
    return Response(_PAGE, media_type="text/html; charset=utf-8", headers=_HEADERS)


def _hashes(tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", _PAGE, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


_PAGE = files("alignedserve.gateway").joinpath("page.html").read_text(encoding="utf-8")
_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
