"""What is kept of a call for its explanation and its trace: facts, and why it ended. None of its text."""

import time

from alignedserve.api.errors import Overloaded
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation_request import GenerationRequest
from alignedserve.api.timelines.request_ids import REQUEST_ID_HEADER, plain_request_id
from alignedserve.api.timelines.timeline import CallFacts
from alignedserve.messages.request_notes import Cause


def call_facts(request: GenerationRequest, services: ModelServices) -> CallFacts:
    """Return the facts of a call that is submitted now, and decide whether it is traced."""
    arrival = request.arrival
    return CallFacts(
        response_id=request.response_id,
        http_id=arrival.request_id,
        client_id=plain_request_id(arrival.headers.get(REQUEST_ID_HEADER)),
        owner=arrival.tenant,
        model=request.model,
        service_tier=request.service_tier,
        num_prompt_tokens=request.num_prompt_tokens,
        received_s=arrival.arrival_s,
        received_unix_s=time.time() - (time.monotonic() - arrival.arrival_s),
        trace=services.timelines.trace_of(arrival.headers),
    )


def cause_of(error: BaseException | None) -> Cause:
    """Return why choices have ended that had not finished."""
    if isinstance(error, Overloaded):
        return Cause.REJECTED
    return Cause.FAILED if isinstance(error, Exception) else Cause.CLIENT_GONE
