"""The start of a cluster: who is told of it, how long it may take, and whether a token has passed through."""

import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ray
from ray.exceptions import RayError

from alignedserve.cluster.memory_planner import SizeChoice
from alignedserve.core.errors import AlignedServeError, ResourceError
from alignedserve.process.loading_progress import LoadedShare
from alignedserve.runtime.device_check.choice import DeviceChoice

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0  # without progress


class StartObserver(Protocol):
    """A receiver of what happens while a cluster starts."""

    def device_chosen(self, choice: DeviceChoice) -> None:
        """Say what engine.device=auto means here, where there is something to say."""

    def sizes_chosen(self, choice: SizeChoice, *, has_others: bool = False) -> None:
        """Say what was chosen, before anything is started. `has_others`: beside it other models are served."""

    def model_loading(self, progress: LoadedShare) -> None:
        """Show how much of the model the workers have loaded, on average."""


class LoggingObserver:
    """Writes what was chosen to the log."""

    def device_chosen(self, choice: DeviceChoice) -> None:
        choice.log()

    def sizes_chosen(self, choice: SizeChoice, *, has_others: bool = False) -> None:
        logger.info(choice.line(names_model=has_others))
        for warning in choice.remarks(names_model=has_others):
            logger.warning(warning)

    def model_loading(self, progress: LoadedShare) -> None: ...


class Patience:
    """The time left to a start: `timeout_s` from its last progress."""

    def __init__(
        self,
        look: Callable[[], Sequence[LoadedShare | None]],
        timeout_s: float,
        observer: StartObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self._look, self._observer, self._clock = look, observer, clock
        self._known: list[LoadedShare | None] = []
        self._ends_s = clock() + timeout_s

    def is_over(self) -> bool:
        seen = list(self._look())
        if seen != self._known:
            self._known, self._ends_s = seen, self._clock() + self.timeout_s
            shares = [share for share in seen if share is not None]
            mean = (sum(counts) // len(shares) for counts in zip(*shares, strict=True))
            self._observer.model_loading(LoadedShare(*mean))
        return self._clock() >= self._ends_s


class Starting:
    """Actors that come up."""

    def __init__(self, actors: Mapping[str, Any], patience: Patience) -> None:
        self._asked = {actor.failure.remote(): name for name, actor in actors.items()}
        self._patience = patience

    def look(self, timeout_s: float = 0.0) -> None:
        """Look whether more have come up, within this time. Raises the error of the first one that fails."""
        if self._asked:
            answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout_s)
            for reference in answered:
                _require_up(reference, self._asked.pop(reference))
        if self._asked and self._patience.is_over():
            names, seconds = ", ".join(self._asked.values()), self._patience.timeout_s
            raise ResourceError(f"{names} did not start, without progress for {seconds:.0f} s; see their logs")

    @property
    def is_over(self) -> bool:
        return not self._asked


def _require_up(reference: Any, name: str) -> None:
    try:
        failure: AlignedServeError | None = ray.get(reference)
    except RayError as error:
        raise ResourceError(f"{name} did not start: {str(error).splitlines()[0]}") from error
    if failure is not None:
        raise failure


MODEL_FAILS = "model_fails"  # the code of a gateway's answer where waiting does not help
_TIMEOUT_S = 2.0


class NotReady(NamedTuple):
    """The gateway's reason for a missing token."""

    reason: str
    is_lasting: bool = False  # the model itself fails at every try


def ask_ready(url: str) -> NotReady | None:
    # Its own gateway: asked past any proxy, by an address that the certificate need not name; nothing secret is sent.
    trust = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())  # noqa: S323
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({}), trust).open(f"{url}/ready", None, _TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return _as_said(error)
    except OSError as error:
        return NotReady(f"the gateway does not answer ({error})")


def _as_said(answer: urllib.error.HTTPError) -> NotReady:
    try:
        said = json.loads(answer.read())["error"]
        return NotReady(str(said["message"]).removeprefix("Not ready: ").rstrip("."), said["code"] == MODEL_FAILS)
    except (OSError, ValueError, LookupError, TypeError):
        return NotReady(f"the gateway answers {answer.code}")
