"""The HTTP response of every JSON endpoint."""

from typing import Any

import orjson
from starlette.responses import Response
from typing_extensions import override


class JsonResponse(Response):
    """A response of JSON, encoded here unless it already is."""

    media_type = "application/json"

    @override
    def render(self, content: Any) -> bytes:
        """Return the encoded content."""
        return content if isinstance(content, bytes) else orjson.dumps(content)
