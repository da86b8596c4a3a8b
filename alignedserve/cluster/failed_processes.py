"""Starts processes again that do not serve, as restarts.py decides, beside the loop of the driver."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from ray.exceptions import RayError

from alignedserve.cluster.restarts import Health, ProcessState, Restarts

logger = logging.getLogger(__name__)


class FailedProcesses:
    """The processes of one cluster that do not serve. `look` about once a second; nothing here waits."""

    def __init__(self, healths: Callable[[], Mapping[str, Health]], start_again: Callable[[str], None]) -> None:
        """`start_again`: raises an error of Ray's while it holds the former process."""
        self._healths = healths
        self._start_again = start_again
        self._restarts = Restarts()
        self.problems: Mapping[str, str] = {}  # by process, since the last look

    @property
    def failing(self) -> frozenset[str]:
        """Processes that do not serve and have failed to start again and again."""
        return self._restarts.failing

    def look(self) -> bool:
        for name in self._restarts.look(self._healths(), time.monotonic()):
            logger.info("%s is started again", name)
            try:
                self._start_again(name)
            except (RayError, ValueError):  # the next pause is longer
                logger.warning("%s cannot be started yet", name, exc_info=True)
        former, self.problems = self.problems, self._restarts.problems
        for name, problem in self.problems.items():
            if problem != former.get(name):
                logger.error("%s does not serve: %s", name, problem)
        for name in former.keys() - self.problems.keys():
            logger.info("%s serves, or is gone", name)
        return self.problems != former

    def are_awaited(self, names: Iterable[str]) -> bool:
        healths = self._healths()
        return any(
            healths.get(name, Health()).state is ProcessState.STARTING and name not in self.problems for name in names
        )
