"""Service level objectives that clients send as headers."""

import re
from collections.abc import Mapping

from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import Slo

TTFT_HEADER, TPOT_HEADER, DEADLINE_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-deadline-ms"
_MAX_SLO_MS = 3_600_000.0
_MAX_DEADLINE_MS = 7 * 24 * 3_600_000.0
_MILLISECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)


def parse_slo(headers: Mapping[str, str]) -> Slo:
    """Return the objectives in these headers. Raises InvalidRequest naming the header."""
    return Slo(
        ttft_s=_seconds(headers, TTFT_HEADER),
        tpot_s=_seconds(headers, TPOT_HEADER),
        deadline_s=_seconds(headers, DEADLINE_HEADER, _MAX_DEADLINE_MS),
    )


def _seconds(headers: Mapping[str, str], name: str, at_most_ms: float = _MAX_SLO_MS) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    value_ms = float(text) if _MILLISECONDS.fullmatch(text) else 0.0
    if not 0.0 < value_ms <= at_most_ms:
        raise InvalidRequest(f"{name} must be milliseconds above 0 and at most {at_most_ms:.0f}.", param=name)
    return value_ms / 1000.0
