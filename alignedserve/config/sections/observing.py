"""The sections about the observation of single requests: explanations, and traces for a collector."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from alignedserve.config.sections.base import MIB, Section


class ExplainConfig(Section, frozen=True):
    """Courses of requests, which gateways keep for `alignedserve explain`."""

    enabled: bool = True
    keep_s: float = 3600.0  # after the end of a request
    max_requests: int = 20_000  # of one gateway; the oldest that have ended make room
    max_bytes: int = 64 * MIB  # likewise

    def __post_init__(self) -> None:
        self._require(0.0 < self.keep_s <= 7 * 86_400.0, "keep_s", "must be above 0 and at most 604800")
        self._require_positive("max_requests", "max_bytes")


class TracingConfig(Section, frozen=True):
    """Traces of OpenTelemetry, sent by gateways with OTLP over HTTP."""

    endpoint: str | None = None  # of a collector, such as http://127.0.0.1:4318; unset: no traces
    sample_ratio: float = 1.0  # of requests whose client does not say whether they are traced
    service_name: str = "alignedserve"
    timeout_s: float = 10.0  # of sending a message, all tries together
    max_queued_requests: int = 2048  # waiting to be sent; traces beyond are dropped, and counted

    def __post_init__(self) -> None:
        self._require(self.endpoint is None or _is_url(self.endpoint), "endpoint", "must be an http or https URL")
        self._require(0.0 <= self.sample_ratio <= 1.0, "sample_ratio", "must be between 0 and 1")
        self._require(0 < len(self.service_name) <= 200, "service_name", "must have 1 to 200 characters")
        self._require(0.1 <= self.timeout_s <= 60.0, "timeout_s", "must be between 0.1 and 60")
        self._require(1 <= self.max_queued_requests <= 100_000, "max_queued_requests", "must be between 1 and 100000")


@dataclass(frozen=True, slots=True)
class Observing:
    """What a gateway gets of both, with the headers (secrets, perhaps) that the collector wants."""

    explain: ExplainConfig = field(default_factory=ExplainConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def is_on(self) -> bool:
        return self.explain.enabled or self.tracing.endpoint is not None


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
