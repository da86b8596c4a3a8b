"""Lines about requests that fail: some a minute of each status, as anyone at the port can make any number fail."""

import logging
import time
from collections.abc import Callable

from alignedserve.api.errors import INTERNAL_ERROR, ClientDisconnected, http_error_of

logger = logging.getLogger(__name__)

MAX_LINES = 20  # of one status, in so long:
PERIOD_S = 60.0


class FailureLog:
    """Logs requests that have failed; those beyond a status's lines are told by their number, with the next that is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: dict[int, float] = {}  # by status, as below: when its first line of this period was written
        self._num_failed: dict[int, int] = {}  # since then

    def note(self, request_id: str, path: str, error: Exception) -> None:
        """Note one failed request: a line, with a traceback only for internal errors."""
        row = http_error_of(error)
        if not self._has_line(row.status):
            return
        if row is INTERNAL_ERROR:
            logger.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
        elif isinstance(error, ClientDisconnected):
            logger.info("request %s aborted: %s", request_id, error)
        else:
            # As a literal: the words may come from a chat template, and must not forge a line.
            logger.warning("request %s to %.80r failed with %d: %.300r", request_id, path, row.status, str(error))

    def _has_line(self, status: int) -> bool:
        now, num_failed = self._clock(), self._num_failed.get(status, 0)
        if now - self._began_s.get(status, -PERIOD_S) >= PERIOD_S:
            if num_failed > MAX_LINES:
                logger.warning("%d more requests failed with %d, without lines here", num_failed - MAX_LINES, status)
            self._began_s[status], num_failed = now, 0
        self._num_failed[status] = num_failed + 1
        return num_failed < MAX_LINES
