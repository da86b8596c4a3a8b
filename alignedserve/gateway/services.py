"""The objects that every HTTP request of one gateway shares: those of the API, and what only HTTP needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from alignedserve.api.services import ApiServices
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.core.plugins import load_plugin
from alignedserve.gateway.api_keys import ApiKeys, Tokens
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.intake import Intake, Readiness
from alignedserve.gateway.request_quotas import RequestQuotas
from alignedserve.gateway.storage_metrics import Disks
from alignedserve.gateway.work_process import WorkProcess
from alignedserve.keys.ring import CurrentKeys

_READING = "alignedserve.gateway.long_bodies.process"


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
        work_process=WorkProcess(_READING),
        intake=intake,
        readiness=readiness,
        files_api=files_api,
        disks=disks or Disks(),
    )
