"""The answer of GET /v1/alignedserve/requests/{id}, as the command reads it."""

import msgspec


class ExplainedReason(msgspec.Struct, frozen=True):
    """Why something was so."""

    text: str


class ExplainedObjective(msgspec.Struct, frozen=True):
    """An objective, and what came of it."""

    name: str
    target_ms: float
    measured_ms: float | None
    held: bool | None


class ExplainedPhase(msgspec.Struct, frozen=True):
    """A part of a request's time."""

    name: str
    where: str
    start_ms: float
    duration_ms: float
    is_wait: bool
    reasons: list[ExplainedReason]


class ExplainedEvent(msgspec.Struct, frozen=True):
    """A step of a request."""

    at_ms: float
    where: str
    text: str
    reason: ExplainedReason | None = None


class ExplainedStanding(msgspec.Struct, frozen=True):
    """Where a choice stands that goes on."""

    text: str
    stage: str | None = None
    position: int | None = None
    start_in_ms: float | None = None
    latest_start_in_ms: float | None = None


class ExplainedChoice(msgspec.Struct, frozen=True):
    """The course of one choice."""

    index: int
    finish_reason: str | None
    output_tokens: int | None
    predicted_tokens: float | None
    cached_prompt_tokens: int
    duration_ms: float | None
    objectives: list[ExplainedObjective]
    phases: list[ExplainedPhase]
    events: list[ExplainedEvent]
    events_left_out: int
    standing: ExplainedStanding | None = None  # None: it has ended, or the server tells of none


class ExplainedRequest(msgspec.Struct, frozen=True):
    """A call and its choices."""

    id: str
    client_request_id: str | None
    model: str
    service_tier: str
    gateway: str
    state: str
    prompt_tokens: int
    trace_id: str | None
    choices: list[ExplainedChoice]
    complete: bool = True  # False: steps may still come
