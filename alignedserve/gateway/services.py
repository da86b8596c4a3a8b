"""The objects that every request of one gateway (or batch worker) shares, whichever model it names. No HTTP here."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.backend.interface import CompletionBackend
from alignedserve.gateway.backend.readiness_probe import ReadinessProbe
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.intake import Intake
from alignedserve.gateway.metrics.disk_metrics import Disks
from alignedserve.gateway.metrics.gateway_metrics import GatewayMetrics
from alignedserve.gateway.models.adapter_directory import AdapterDirectory
from alignedserve.gateway.models.grammar_checker import GrammarChecker
from alignedserve.gateway.models.model_card import ModelCard
from alignedserve.gateway.models.model_registry import ModelRegistry, RegisteredModel
from alignedserve.gateway.models.model_services import ModelServices
from alignedserve.gateway.prefix_hasher import PrefixHasher
from alignedserve.gateway.readiness import Readiness
from alignedserve.gateway.request_limiter import RequestLimiter
from alignedserve.gateway.request_quotas import RequestQuotas
from alignedserve.gateway.timelines.exporter import TraceExporter
from alignedserve.gateway.timelines.questions import TimelineQuestions
from alignedserve.gateway.timelines.timelines import Timelines
from alignedserve.gateway.timelines.tracing import make_exporter, make_timelines
from alignedserve.gateway.work_lanes import WorkLanes
from alignedserve.gateway.work_process import WorkProcess
from alignedserve.text.tokenizer import Tokenizer

_READING = "alignedserve.gateway.long_bodies.process"


@dataclass(frozen=True, slots=True)
class Services:
    """Shared objects, made once by `build_services`; routes find them in the app's state."""

    config: GatewayConfig
    reply_to: str  # address where workers send tokens
    api_keys: ApiKeys
    quotas: RequestQuotas
    metrics: GatewayMetrics
    limiter: RequestLimiter
    lanes: WorkLanes
    work_process: WorkProcess  # that reads long bodies
    intake: Intake
    models: ModelRegistry
    readiness: Readiness
    timelines: Timelines
    questions: TimelineQuestions
    exporter: TraceExporter | None = None  # None: no call is traced
    files_api: FilesApi | None = None  # None: files and batches are not served
    disks: Disks = field(default_factory=Disks)  # whose space /metrics tells

    def close(self) -> None:
        """Send the traces that wait, for a moment, and end the process for long bodies."""
        self.work_process.close()
        if self.exporter is not None:
            self.exporter.close()

    def find_model(self, name: str | None) -> ModelServices:
        """Return what requests to the model of this name share; None: to the first one. Raises UnknownModel."""
        return self.models.find(name)

    def add_model(
        self,
        model: ModelCard,
        backend: CompletionBackend,
        tokenizer: Tokenizer,
        prefix_hasher: PrefixHasher | None = None,
    ) -> ModelServices:
        """Serve one more model, until the end. `prefix_hasher`: None: its prefix cache is off."""
        added = self.make_model(model, backend, tokenizer, prefix_hasher)
        self.models.add(RegisteredModel(model, added))
        return added

    def make_model(
        self,
        model: ModelCard,
        backend: CompletionBackend,
        tokenizer: Tokenizer,
        prefix_hasher: PrefixHasher | None = None,
        deployment_id: str = "",
        adapters: AdapterDirectory | None = None,
    ) -> ModelServices:
        """Make what requests to a model share; nothing finds it yet."""
        probe_token_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0
        return ModelServices(
            model=model,
            backend=backend,
            tokenizer=tokenizer,
            grammars=GrammarChecker(tokenizer, model.eos_token_ids),
            metrics=self.metrics.add_model(model.name, backend, deployment_id),
            readiness_probe=ReadinessProbe(backend, token_id=probe_token_id, reply_to=self.reply_to),
            config=self.config,
            limiter=self.limiter,
            lanes=self.lanes,
            reply_to=self.reply_to,
            prefix_hasher=prefix_hasher,
            adapters=adapters,
            timelines=self.timelines,
        )


def build_services(
    config: GatewayConfig,
    *,
    api_keys: Sequence[str] = (),
    reply_to: str = "",
    files_api: FilesApi | None = None,
    quotas: RequestQuotas | None = None,
    observing: Observing | None = None,
    disks: Disks | None = None,
) -> Services:
    """Build the shared objects, without a model. `quotas`: None: this process alone counts requests.

    `observing`: None: calls are explained, and not traced.
    """
    keys, models, intake = ApiKeys(api_keys), ModelRegistry(), Intake()
    observing = observing or Observing()
    exporter = make_exporter(observing, reply_to)
    timelines = make_timelines(observing, exporter)
    readiness, metrics = Readiness(models, intake), GatewayMetrics(exporter)
    metrics.show_readiness(lambda: readiness.missing() is None)
    return Services(
        config=config,
        reply_to=reply_to,
        api_keys=keys,
        quotas=quotas or RequestQuotas(config.requests_per_minute, keys.num_owners),
        metrics=metrics,
        limiter=RequestLimiter(config.max_concurrent_requests),
        lanes=WorkLanes(),
        work_process=WorkProcess(_READING),
        intake=intake,
        models=models,
        readiness=readiness,
        files_api=files_api,
        timelines=timelines,
        questions=TimelineQuestions(timelines),
        exporter=exporter,
        disks=disks or Disks(),
    )
