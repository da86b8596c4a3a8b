"""The objects that every HTTP request of one gateway shares: those of the API, and what only HTTP needs."""

import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from starlette.responses import Response
from typing_extensions import override

from alignedserve.api.errors import Overloaded, ServerDraining
from alignedserve.api.models.model_registry import ModelRegistry
from alignedserve.api.services import ApiServices
from alignedserve.api.work_lanes import Lane
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.core.plugins import load_plugin
from alignedserve.gateway.api_keys import ApiKeys, Tokens
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.quotas import RequestQuotas
from alignedserve.gateway.storage_metrics import Disks
from alignedserve.keys.ring import CurrentKeys
from alignedserve.process.child_process import ChildProcess

logger = logging.getLogger(__name__)

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_LONG_BODIES = "alignedserve.gateway.long_bodies.process"
_MAX_WALL_S = 120.0  # of one piece of work of a process
_RETRY_AFTER_S = 5.0


class Ticket:
    """A request for which a drain waits until `release`, which may be repeated."""

    def __init__(self, intake: "Intake") -> None:
        self._intake, self._is_open = intake, True
        intake.num_open += 1

    def release(self) -> None:
        self._intake.num_open -= self._is_open
        self._is_open = False


class Intake:
    """Counts the HTTP requests that are open, and refuses new work once it is closed."""

    def __init__(self) -> None:
        self.is_closed = False
        self.num_open = 0

    def admit(self, method: str) -> Ticket | None:
        """Return the ticket of a request; None: it is served, but a drain does not wait for it. Raises ServerDraining.

        What only reads is served until the end: whoever asks all the time would never let a drain end otherwise.
        """
        if not self.is_closed:
            return Ticket(self)
        if method in _READING:
            return None
        raise ServerDraining


class Readiness:
    """Knows whether this gateway wants requests, and whether every model that it serves answers."""

    def __init__(self, models: ModelRegistry, intake: Intake) -> None:
        self._models = models
        self._intake = intake
        self.is_draining = False  # no more requests are to come here

    def missing(self) -> str | None:
        return "draining" if self.is_draining or self._intake.is_closed else self._models.missing()

    @property
    def is_hopeless(self) -> bool:
        return self._models.is_hopeless


class WorkProcess:
    """A process beside the gateway's, whose work does not hold the lock that all threads of an interpreter share.

    It is started by the first work, and anew after a loss, and does one piece of work at a time.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = ChildProcess(module, _MAX_WALL_S)
        self._lane = Lane("process", num_threads=1)
        self._is_closed = False
        weakref.finalize(self, self._process.end)

    async def answer(self, *frames: bytes) -> bytes:
        """Return the answer to these frames, in their turn. Raises Overloaded: too much waits, or it was lost."""
        answer = await self._lane.run(partial(self._answer, frames))
        if answer is None:
            logger.warning("%s was lost, or took too long, over %d bytes", self._module, len(frames[-1]))
            raise Overloaded("The request could not be read; it may be too large.", retry_after_s=_RETRY_AFTER_S)
        return answer

    def close(self) -> None:
        """End the process at once; what waits for it has no answer. Blocks for a moment. May be repeated."""
        self._is_closed = True
        self._lane.close()
        self._process.kill()
        self._lane.close(waits=True)
        self._process.end()

    def _answer(self, frames: tuple[bytes, ...]) -> bytes | None:
        if self._is_closed:
            return None
        if not self._process.is_running:
            self._process.start()
        answer = self._process.answer(*frames)
        if answer is None:
            self._process.end()
        return answer


@dataclass(frozen=True, kw_only=True)
class Services(ApiServices):
    """Shared objects, made once by `build_services`; routes find them in the app's state."""

    name: str  # of this gateway
    api_keys: ApiKeys
    quotas: RequestQuotas
    work_process: WorkProcess  # that reads long bodies
    intake: Intake
    readiness: Readiness
    tokens: Tokens | None = None  # None: no token stands for a key
    files_api: FilesApi | None = None  # None: files and batches are not served
    disks: Disks = field(default_factory=Disks)  # whose space /metrics tells
    elsewhere: Callable[..., Awaitable[Response]] | None = None  # answers (call, path) by other servers; None: here

    @property
    def own_labels(self) -> Mapping[str, str] | None:
        return {"gateway": self.name} if self.config.shared_port else None

    @override
    def close(self) -> None:
        self.work_process.close()
        super().close()


def build_services(
    config: GatewayConfig,
    *,
    name: str = "gateway-0",
    keys: CurrentKeys | None = None,
    reply_to: str = "",
    files_api: FilesApi | None = None,
    quotas: RequestQuotas | None = None,
    observing: Observing | None = None,
    disks: Disks | None = None,
    elsewhere: Callable[..., Awaitable[Response]] | None = None,
) -> Services:
    """Build the shared objects, without a model. `keys`: None: anyone may call.

    `quotas`: None: this process alone counts requests. `observing`: None: calls are explained, and not traced.
    Raises ConfigError: the plugin for tokens is not installed.
    """
    api = ApiServices.of(config, reply_to=reply_to, observing=observing, keys=keys)
    intake = Intake()
    readiness = Readiness(api.models, intake)
    api.metrics.show_usage(api.usage)
    api.metrics.show_readiness(lambda: readiness.missing() is None)
    tokens: Tokens | None = load_plugin("jwt").TokenVerifier(config.jwt) if config.jwt else None
    return Services(
        **vars(api),
        name=name,
        api_keys=ApiKeys(api.keys, tokens),
        tokens=tokens,
        quotas=quotas or RequestQuotas(config.requests_per_minute),
        work_process=WorkProcess(_LONG_BODIES),
        intake=intake,
        readiness=readiness,
        files_api=files_api,
        disks=disks or Disks(),
        elsewhere=elsewhere,
    )
