"""Runs a line of a batch as the request that it is, at best effort: the LineRunner of a cluster."""

from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from alignedserve.batches.interfaces import ClusterTotals, LineAnswer, LineBroken, LineCall, LineNotTaken
from alignedserve.batches.records import Endpoint
from alignedserve.core.errors import AlignedServeError, InvalidRequest
from alignedserve.core.request import Slo
from alignedserve.gateway.errors import GenerationError, Overloaded, Unavailable, Unservable, body_of, http_error_of
from alignedserve.gateway.openai.calls import Call, chat_call, completion_call
from alignedserve.gateway.openai.choice_decoder import Piece
from alignedserve.gateway.openai.generation import Generation
from alignedserve.gateway.openai.parsing import check_shape, parse_chat, parse_completion
from alignedserve.gateway.openai.request_builder import DEADLINE_HEADER, new_arrival
from alignedserve.gateway.openai.schemas import GenerationFields
from alignedserve.gateway.services import Services

_PAUSE_S = 1.0
_BEST_EFFORT = "flex"
_TIERS = ("auto", "default", _BEST_EFFORT)

FieldsT = TypeVar("FieldsT", bound=GenerationFields)


class ClusterLines:
    """A LineRunner over a gateway's services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, call: LineCall) -> LineAnswer:
        """See LineRunner."""
        try:
            planned = await self._planned(call)
        except InvalidRequest as error:
            return _refusal(error)
        has_begun = False
        choices: list[list[Piece]] = [[] for _ in planned.plan.requests]
        try:
            async with Generation(planned.plan, self._services) as generation, aclosing(generation.pieces()) as pieces:
                has_begun = True
                async for index, piece in pieces:
                    choices[index].append(piece)
                usage = generation.usage()
                body = planned.answer.body(generation, choices)
        except GenerationError as error:
            return _failed(error, has_begun=has_begun)
        return LineAnswer(200, body, usage["prompt_tokens"], usage["completion_tokens"])

    def cluster_totals(self) -> ClusterTotals | None:
        """See LineRunner."""
        status = self._services.backend.status()
        if status is None:
            return None
        totals = status.iteration_log
        return ClusterTotals(totals.num_requests, totals.wall_s, totals.nothing_to_do_s)

    async def _planned(self, call: LineCall) -> Call:
        """Raises InvalidRequest: the line can never be run."""
        check_shape(call.body, self._services.config.max_json_depth)
        headers = {} if call.deadline_s is None else {DEADLINE_HEADER: f"{call.deadline_s * 1000.0:.3f}"}
        arrival = new_arrival(call.request_id, headers)
        if call.endpoint is Endpoint.CHAT:
            planned = await chat_call(_at_best_effort(parse_chat(call.body)), arrival, self._services)
        else:
            planned = await completion_call(_at_best_effort(parse_completion(call.body)), arrival, self._services)
        # The line's deadline is ours, not the client's: its answer says nothing of it.
        return planned._replace(plan=replace(planned.plan, slo=Slo()))


def _at_best_effort(fields: FieldsT) -> FieldsT:
    """The same at the tier of batches. Raises InvalidRequest for what a line cannot ask for."""
    if fields.stream:
        raise InvalidRequest("stream is not supported in a batch.", param="stream", code="unsupported_parameter")
    if fields.service_tier not in _TIERS:
        raise InvalidRequest(
            "Lines of a batch run at best effort; leave service_tier out.",
            param="service_tier",
            code="unsupported_parameter",
        )
    return fields.model_copy(update={"service_tier": _BEST_EFFORT})


def _failed(error: GenerationError, *, has_begun: bool) -> LineAnswer:
    """The answer that says so for ever, or an error that says to try again."""
    if isinstance(error, Unservable):
        return _refusal(error)
    if isinstance(error, Overloaded) or (isinstance(error, Unavailable) and not has_begun):
        raise LineNotTaken(str(error), retry_after_s=error.retry_after_s or _PAUSE_S) from error
    raise LineBroken(str(error)) from error


def _refusal(error: AlignedServeError) -> LineAnswer:
    return LineAnswer(http_error_of(error).status, body_of(error))
