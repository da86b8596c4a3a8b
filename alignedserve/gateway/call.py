"""One HTTP request: who calls, what the gateway shares, what is held until the response has ended."""

import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from alignedserve.api.errors import Forbidden, NotFound, ResourceUnavailable
from alignedserve.api.models.model_registry import usable_model, usable_name
from alignedserve.api.models.model_services import BEST_EFFORT_RETRY_S, ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.request_builder import Arrival, class_of
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.timelines.timeline import plain_request_id
from alignedserve.api.work_lanes import note_class
from alignedserve.core.request import RequestClass
from alignedserve.gateway.connections.http_protocol import StreamedBody
from alignedserve.gateway.connections.limits import ConnectionPlace, CountedBody
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.json_response import is_anthropic
from alignedserve.gateway.quotas import ShownLimits
from alignedserve.gateway.services import Services, Ticket
from alignedserve.keys.entry import ANYONE, KeyEntry


class NamesModel(Protocol):
    """A body that may name a model."""

    @property
    def model(self) -> str | None:
        """Return its name; None: the first one."""


class Call:
    """Made by the middleware, which routes and responses find by `Call.of`.

    It leads to the scope by `http`, so at the end the middleware takes it out of the scope. In a cycle a request would
    stay until a garbage collection comes by: of 50 chats a second a hundred thousand objects, at which the gateway
    stopped for half a second.
    """

    def __init__(self, services: Services, scope: Scope) -> None:
        state: dict[str, Any] = scope.setdefault("state", {})
        state["call"] = self
        self.services = services
        self.http = Request(scope)  # its head; with its body once the client is known
        self.is_anthropic = is_anthropic(scope)
        self.request_id = secrets.token_hex(16)
        self.client_id = plain_request_id(self.http.headers.get("x-request-id"))  # None: the client gave none
        self.known_key: KeyEntry | None = None  # None: not yet, or it is refused
        self.ignored = None if services.config.strict else IgnoredFields()  # None: unknown fields are refused
        self.limits = ShownLimits()
        self.held = ExitStack()  # until the response has ended
        self.ticket: Ticket | None = None
        self.place: ConnectionPlace | None = state.pop("connection", None)  # None: no server counts connections
        self.body: CountedBody | None = None  # that still arrives
        self.closes_connection = False
        self.streamed_body: StreamedBody | None = state.pop("streamed_body", None)
        self.failure_events: Callable[[Exception], bytes] | None = None  # the last events of a stream that fails
        self.status: int | None = None  # None: nothing was answered
        self.num_bytes = 0  # of the answer's body
        self.generation: Generation | None = None
        self._is_open = False

    @staticmethod
    def of(scope: Scope) -> "Call":
        call = scope["state"]["call"]
        assert isinstance(call, Call), "a request that came past the middleware"
        return call

    @property
    def key(self) -> KeyEntry:
        assert self.known_key is not None, "a request whose key was not looked up"
        return self.known_key

    def client_of(self, key: KeyEntry) -> str:
        """Return who has turns: the key's owner, or the address where anyone may call."""
        if key is not ANYONE:
            return key.owner
        return self.http.client.host if self.http.client is not None else ""

    @property
    def arrival(self) -> Arrival:
        return Arrival(self.request_id, self.http.headers, self.key, self.ignored)

    @property
    def files_api(self) -> FilesApi:
        """Return files and batches. Raises NotFound where they are not served."""
        if self.services.files_api is None:
            raise NotFound("Files and batches are not served here (batches.enabled is false).", code="batches_disabled")
        return self.services.files_api

    def check_sees_all(self) -> None:
        """Raise Forbidden for a key that may not read what tells of all keys."""
        if not self.key.sees_all:
            raise Forbidden("This key may not see what others use (may_see_usage).", code="usage_not_allowed")

    @property
    def answer_elsewhere(self) -> Callable[[str], Awaitable[Response]] | None:
        """Return the answerer of a path by other servers; None: models are served here."""
        elsewhere = self.services.elsewhere
        return None if elsewhere is None else partial(elsewhere, self)

    @property
    def is_last(self) -> bool:
        is_refused = self.body is not None and self.body.is_refused
        return self.services.intake.is_closed or self.closes_connection or is_refused

    def release_early(self) -> None:
        """Let a drain not wait for this request, which its client can take up again elsewhere."""
        if self.ticket is not None:
            self.ticket.release()

    # --- what is counted

    def hold_connection(self, request_class: RequestClass) -> None:
        """Count the connection as one of this class. Raises ResourceUnavailable: best effort has too many."""
        if self.place is None:
            return
        if request_class is RequestClass.REAL_TIME:
            self.place.take_real_time()
        elif not self.place.take_best_effort():
            self.closes_connection = True
            message = "The gateway has too many connections open for best-effort requests."
            raise ResourceUnavailable(message, retry_after_s=BEST_EFFORT_RETRY_S)

    async def hold_open(self) -> None:
        """Count the call as open until its response has ended, once. Raises QuotaExceeded, Unavailable."""
        if self._is_open:
            return
        open_requests = self.services.quotas.open_requests
        await open_requests.open(self.key)
        self.held.callback(open_requests.close, self.key)
        self._is_open = True

    async def hold_limits(self, generation: Generation) -> None:
        """Count the call as open, and its tokens; unused ones are given back at the end of the response.

        Raises QuotaExceeded, Unavailable.
        """
        request = generation.request
        num_wanted = request.num_prompt_tokens + sum(choice.sampling.max_tokens for choice in request.requests)

        def num_used() -> int:
            return request.num_prompt_tokens + generation.num_generated_tokens if generation.has_started else 0

        await self.hold_tokens(num_wanted, num_used)

    async def hold_tokens(self, num_wanted: int, num_used: Callable[[], int]) -> None:
        """Count the call as open, and these tokens; unused tokens are given back at its end. Raises as
        `hold_limits`."""
        await self.hold_open()
        if self.key.tokens_per_minute is None:
            return
        quotas, counted_s = self.services.quotas, time.monotonic()
        await quotas.count_tokens(self.key, num_wanted, self.limits)
        self.held.callback(lambda: quotas.give_back(self.key, num_wanted - num_used(), counted_s))

    # --- its model

    def model(self, name: str | None) -> ModelServices:
        """Return the model of this name, held until the response has ended. Raises UnknownModel, Unavailable."""
        model = usable_model(self.services.models, name, self.key)
        self.held.enter_context(model.in_use())
        return model

    async def loading(self, body: NamesModel) -> Callable[[], Coroutine[Any, Any, ModelServices]] | None:
        """Return what waits for the model of a body to be loaded; None: it does not sleep.

        Raises InvalidRequest, QuotaExceeded, Unavailable.
        """
        models = self.services.models
        name, request_class = usable_name(models, body.model, self.key), class_of(body, self.key)
        note_class(request_class)
        if not models.is_asleep(name):
            return None
        self.hold_connection(request_class)
        await self.hold_open()  # waiting for the model counts, too
        return partial(self.services.awake_model, name, request_class)


Serve = Callable[..., Awaitable[Response]]  # takes the call, and the parameters of the path by their names


class RouteTable(list[Route]):
    """The routes of a group of endpoints."""

    def add(self, method: str, path: str, *, is_counted: bool = True) -> Callable[[Serve], Serve]:
        """Serve a path, without its `/v1` too. `is_counted`: requests count against the key's quota before the work."""

        def add(serve: Serve) -> Serve:
            for spelling in dict.fromkeys((path, path.removeprefix("/v1"))):
                self.append(Route(spelling, _Served(serve, is_counted), methods=[method]))
            return serve

        return add


class _Served:
    def __init__(self, serve: Serve, is_counted: bool) -> None:
        self._serve = serve
        self._is_counted = is_counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call.of(scope)
        if self._is_counted:
            await call.services.quotas.count(call.key, call.limits)
        call.http = Request(scope, receive)
        response = await self._serve(call, **scope["path_params"])
        await response(scope, receive, send)
