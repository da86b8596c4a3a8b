"""What the routes share."""

from dataclasses import dataclass
from typing import Any

from starlette.requests import HTTPConnection, Request

from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.backend.interface import CompletionBackend
from alignedserve.gateway.backend.readiness_probe import ReadinessProbe
from alignedserve.gateway.errors import NotFound, Overloaded, UnknownModel
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.metrics.gateway_metrics import GatewayMetrics
from alignedserve.gateway.model_card import ModelCard
from alignedserve.runtime.model.tokenizer import Tokenizer


class Capacity:
    """Requests that this gateway has open in the cluster, and how many it may have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_open = 0

    def take(self, count: int) -> None:
        """Open requests. Raises Overloaded when that would be too many."""
        if self.num_open + count > self._limit:
            raise Overloaded("The gateway has too many requests open.", retry_after_s=1.0)
        self.num_open += count

    def give_back(self, count: int) -> None:
        """Close requests."""
        self.num_open -= count
        assert self.num_open >= 0, "more requests closed than opened"


@dataclass(frozen=True, slots=True)
class Services:
    """Made once by the app's builder; routes find it in the app's state."""

    backend: CompletionBackend
    tokenizer: Tokenizer
    model: ModelCard
    config: GatewayConfig
    reply_to: str  # address where workers send tokens
    keys: ApiKeys
    metrics: GatewayMetrics
    capacity: Capacity
    canary: ReadinessProbe
    files_api: FilesApi | None = None  # None: no files and batches here

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModel unless this is the model that is served; None means just that one."""
        if name is not None and name != self.model.name:
            raise UnknownModel("The requested model does not exist here; see /v1/models.", param="model")


def services_of(connection: HTTPConnection) -> Services:
    """The app's services."""
    state: Any = connection.app.state
    services = state.services
    assert isinstance(services, Services), "an app without services"
    return services


def files_api_of(http: Request) -> tuple[FilesApi, str]:
    """Where files and batches are, and whose of them this request may see. Raises QuotaExceeded, or NotFound where
    there are none."""
    services = services_of(http)
    services.keys.spend(http.state.key_number)
    if services.files_api is None:
        raise NotFound("Files and batches are not served here (batches.enabled is false).", code="batches_disabled")
    return services.files_api, services.keys.owner(http.state.key_number)
