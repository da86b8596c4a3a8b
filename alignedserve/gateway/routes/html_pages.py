"""Pages that are single files without external resources, and the policy under which browsers show them."""

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from starlette.responses import Response


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
