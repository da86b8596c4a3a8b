"""Class and objectives of a request, from `priority` and `vllm_xargs`.

"vllm_xargs": {"slo_ttft_ms": 1000, "slo_tpot_ms": 300}               a chat
"vllm_xargs": {"service_class": "document", "deadline_ms": 3600000}   a document that must end within an hour
"priority": 10                                                        a document
nothing                                                               a chat with the default objectives
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignedserve.core.request import MAX_PRIORITY, MAX_TENANT_LEN, RequestClass, Slo

CLASSES = {"chat": RequestClass.REAL_TIME, "document": RequestClass.BEST_EFFORT}
_HOUR_MS, _WEEK_MS = 3_600_000.0, 7 * 86_400_000.0
_MOST_MS = {"slo_ttft_ms": _HOUR_MS, "slo_tpot_ms": _HOUR_MS, "deadline_ms": _WEEK_MS}  # as our gateway's headers
NO_SLO, DEFAULT_SLO = Slo(), Slo(ttft_s=1.0, tpot_s=0.2)


class BadTerms(ValueError):
    """A request says something about its class or objectives that has no meaning. The text holds no word of it."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"vllm_xargs.{name} {problem}.")
        self.name = name


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """What a request asks of the scheduler."""

    request_class: RequestClass = RequestClass.REAL_TIME
    slo: Slo = NO_SLO
    priority: int = 0  # smaller goes first among equals
    tenant: str = ""

    @property
    def is_chat(self) -> bool:
        return self.request_class is RequestClass.REAL_TIME


def read_terms(xargs: Mapping[str, Any], priority: int, default: Slo) -> RequestTerms:
    """Return the terms of a request. Raises BadTerms."""
    seconds = {name: _seconds(xargs, name) for name in _MOST_MS}
    slo = Slo(seconds["slo_ttft_ms"], seconds["slo_tpot_ms"], seconds["deadline_ms"])
    is_paced = slo.ttft_s is not None or slo.tpot_s is not None
    kind = xargs.get("service_class")
    if kind is None:
        kind = "document" if priority > 0 and not is_paced else "chat"
    if not isinstance(kind, str) or kind not in CLASSES:
        raise BadTerms("service_class", f"must be one of {', '.join(CLASSES)}")
    if kind == "document" and is_paced:
        name = "slo_ttft_ms" if slo.ttft_s is not None else "slo_tpot_ms"
        raise BadTerms(name, "is an objective of chats; a document has deadline_ms alone")
    tenant = xargs.get("tenant", "")
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_LEN:
        raise BadTerms("tenant", f"must be a name of at most {MAX_TENANT_LEN} letters")
    bounded = max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
    return RequestTerms(CLASSES[kind], slo.completed_by(default) if kind == "chat" else slo, bounded, tenant)


def _seconds(xargs: Mapping[str, Any], name: str) -> float | None:
    value = xargs.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 < value <= _MOST_MS[name] or math.isnan(value):
        raise BadTerms(name, f"must be a number of milliseconds above 0 and at most {_MOST_MS[name]:.0f}")
    return float(value) / 1000.0
