"""Functions that routes call first: find the app's services and count the request against its key's quota."""

import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from alignedserve.api.errors import Forbidden, NotFound, ResourceUnavailable
from alignedserve.api.models.model_registry import usable_model, usable_name
from alignedserve.api.models.model_services import BEST_EFFORT_RETRY_S, ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.generation_request import class_of
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import note_class
from alignedserve.core.request import RequestClass
from alignedserve.gateway.connections.limits import ConnectionPlace
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.services import Services
from alignedserve.gateway.streaming import AwaitedResponse, while_connected
from alignedserve.keys.entry import KeyEntry


class AsksModel(Protocol):
    """A body that may name a model."""

    @property
    def model(self) -> str | None:
        """Return its name; None: the first one."""


def services_of(connection: HTTPConnection) -> Services:
    """Return the app's services."""
    state: Any = connection.app.state
    services = state.services
    assert isinstance(services, Services), "an app without services"
    return services


def key_of(http: HTTPConnection) -> KeyEntry:
    """Return the entry of the client's key, which the middleware has found."""
    key = http.state.key
    assert isinstance(key, KeyEntry), "a request that came past the middleware"
    return key


def overseen_services(http: HTTPConnection) -> Services:
    """Return the app's services, to tell of all keys. Raises Forbidden."""
    if not key_of(http).sees_all:
        raise Forbidden("This key may not see what others use (may_see_usage).", code="usage_not_allowed")
    return services_of(http)


async def rate_limited_services(http: Request) -> Services:
    """Return the app's services after counting this request. Raises QuotaExceeded, Unavailable."""
    services = services_of(http)
    await services.quotas.count(key_of(http), http.state.shown_limits)
    return services


def hold_connection(http: Request, request_class: RequestClass) -> None:
    """Count the connection as one of the class of its request. Raises ResourceUnavailable: best effort has too many."""
    place: ConnectionPlace | None = http.scope["state"].get("connection")
    if place is None:  # no server counts connections here
        return
    if request_class is RequestClass.REAL_TIME:
        place.take_real_time()
    elif not place.take_best_effort():
        http.state.closes_connection = True
        message = "The gateway has too many connections open for best-effort requests."
        raise ResourceUnavailable(message, retry_after_s=BEST_EFFORT_RETRY_S)


async def hold_open(http: Request) -> None:
    """Count a call as open until its response has ended, once. Raises QuotaExceeded, Unavailable."""
    if getattr(http.state, "is_counted_open", False):
        return
    services, key = services_of(http), key_of(http)
    await services.quotas.open_requests.open(key)
    http.state.held_until_response.callback(services.quotas.open_requests.close, key)
    http.state.is_counted_open = True


async def hold_limits(http: Request, generation: Generation) -> None:
    """Count a call as open until its response has ended, and its tokens; what did not come is given back then.

    Raises QuotaExceeded, Unavailable.
    """
    services, key = services_of(http), key_of(http)
    await hold_open(http)
    if key.tokens_per_minute is None:
        return
    request, counted_s = generation.request, time.monotonic()
    num_asked = request.num_prompt_tokens + sum(one.sampling.max_tokens for one in request.requests)
    await services.quotas.count_tokens(key, num_asked, http.state.shown_limits)

    def give_back() -> None:
        num_used = request.num_prompt_tokens + generation.num_generated_tokens if generation.has_started else 0
        services.quotas.give_back(key, num_asked - num_used, counted_s)

    http.state.held_until_response.callback(give_back)


def model_of(http: Request, name: str | None) -> ModelServices:
    """Return the model of this name, held until the response has ended. Raises UnknownModel, Unavailable."""
    model = usable_model(services_of(http).models, name, key_of(http))
    http.state.held_until_response.enter_context(model.in_use())
    return model


async def awake_model_of(http: Request, asked: AsksModel) -> ModelServices:
    """Return what `model_of` does, after the model has been loaded if it sleeps. Raises also Overloaded."""
    waiting = await _wait_for_model(http, asked)
    if waiting is not None:
        await while_connected(http.receive, waiting())
    return model_of(http, asked.model)


async def answered_awake(
    http: Request, asked: AsksModel, answer: Callable[[], Awaitable[Response]], *, is_streamed: bool
) -> Response:
    """Return what `answer` does; or if the model sleeps a response that has it made once the model is loaded."""
    waiting = await _wait_for_model(http, asked)
    return await answer() if waiting is None else AwaitedResponse(waiting, answer, is_streamed=is_streamed)


async def _wait_for_model(http: Request, asked: AsksModel) -> Callable[[], Coroutine[Any, Any, ModelServices]] | None:
    """Return what waits for the model of a body to be loaded; None: it does not sleep. Raises InvalidRequest."""
    services, key = services_of(http), key_of(http)
    name, request_class = usable_name(services.models, asked.model, key), class_of(asked, key)
    note_class(request_class)
    if not services.models.is_asleep(name):
        return None
    hold_connection(http, request_class)
    await hold_open(http)  # one that waits for the model takes a place as others do
    return partial(services.awake_model, name, request_class)


async def files_api_of(http: Request) -> tuple[FilesApi, str]:
    """Return files and batches, and the client that owns them. Raises QuotaExceeded, Unavailable, NotFound."""
    services = await rate_limited_services(http)
    if services.files_api is None:
        raise NotFound("Files and batches are not served here (batches.enabled is false).", code="batches_disabled")
    return services.files_api, key_of(http).owner


def ignored_fields_of(http: Request) -> IgnoredFields | None:
    """Return what collects this request's ignored fields for its response's header; None where they are refused."""
    if services_of(http).config.strict:
        return None
    http.state.ignored_fields = IgnoredFields()
    return http.state.ignored_fields  # type: ignore[no-any-return]
