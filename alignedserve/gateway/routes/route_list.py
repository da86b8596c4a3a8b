"""The routes of one part of the API, listed where their functions are defined."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HandlerT = TypeVar("HandlerT", bound=Callable[..., Awaitable[Response]])


class RouteList:
    """Routes in the order in which they are tried. Each function takes the request, and by name what the path holds."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def get(self, path: str) -> Callable[[HandlerT], HandlerT]:
        """Return a decorator: the function answers GET at this path."""
        return self._at(path, "GET")

    def post(self, path: str) -> Callable[[HandlerT], HandlerT]:
        """Return a decorator, as `get` does."""
        return self._at(path, "POST")

    def delete(self, path: str) -> Callable[[HandlerT], HandlerT]:
        """Return a decorator, as `get` does."""
        return self._at(path, "DELETE")

    def _at(self, path: str, method: str) -> Callable[[HandlerT], HandlerT]:
        def add(handler: HandlerT) -> HandlerT:
            async def answer(http: Request) -> Response:
                return await handler(http, **http.path_params)

            route = Route(path, answer)
            route.methods = {method}  # without HEAD, which is answered as GET for all of them
            self.routes.append(route)
            return handler

        return add
