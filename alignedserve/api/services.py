"""The objects that every request of one gateway (or batch worker) shares, whichever model it names. No HTTP here."""

from dataclasses import dataclass, field
from functools import partial

from alignedserve.api.backend.interface import CompletionBackend, ReadinessProbe
from alignedserve.api.metrics.gateway_metrics import GatewayMetrics
from alignedserve.api.models.model_registry import ModelRegistry, RegisteredModel, WaitingLine
from alignedserve.api.models.model_services import (
    AdapterDirectory,
    GrammarChecker,
    ModelCard,
    ModelServices,
    RequestLimiter,
)
from alignedserve.api.objectives import default_slo_at
from alignedserve.api.picture_reader import PictureReader
from alignedserve.api.prefix_hasher import PrefixHasher
from alignedserve.api.timelines.exporter import TraceExporter
from alignedserve.api.timelines.questions import TimelineQuestions
from alignedserve.api.timelines.timeline import Timelines
from alignedserve.api.work_lanes import WorkLanes
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.core.request import RequestClass
from alignedserve.keys.ring import CurrentKeys
from alignedserve.text.tokenizer import Tokenizer, TokenizerOnUse
from alignedserve.usage.ledger import UsageLedger

MOST_WAITING = 4096  # requests of one gateway and class, for models that sleep


@dataclass(frozen=True, kw_only=True)
class ApiServices:
    """Shared objects of a process that generates, made once by `of`."""

    config: GatewayConfig
    reply_to: str  # address where workers send tokens
    metrics: GatewayMetrics
    limiter: RequestLimiter
    timelines: Timelines
    questions: TimelineQuestions
    exporter: TraceExporter | None = None  # None: no call is traced
    keys: CurrentKeys = field(default_factory=CurrentKeys)
    lanes: WorkLanes = field(default_factory=WorkLanes)
    pictures: PictureReader = field(default_factory=PictureReader)
    usage: UsageLedger = field(default_factory=UsageLedger)
    models: ModelRegistry = field(default_factory=ModelRegistry)
    line: WaitingLine = field(default_factory=lambda: WaitingLine(MOST_WAITING))

    @classmethod
    def of(
        cls,
        config: GatewayConfig,
        *,
        reply_to: str = "",
        observing: Observing | None = None,
        keys: CurrentKeys | None = None,
    ) -> "ApiServices":
        """Make the objects, without a model. `observing`: None: calls are explained, and not traced.

        `keys`: None: anyone may call."""
        observing = observing or Observing()
        exporter = make_exporter(observing, reply_to)
        timelines = make_timelines(observing, exporter)
        return cls(
            config=config,
            reply_to=reply_to,
            metrics=GatewayMetrics(exporter),
            limiter=RequestLimiter(config.max_concurrent_requests, config.max_best_effort_requests),
            timelines=timelines,
            questions=TimelineQuestions(timelines),
            exporter=exporter,
            keys=keys or CurrentKeys(),
        )

    def close(self) -> None:
        """Send the traces that wait, for a moment."""
        if self.exporter is not None:
            self.exporter.close()

    def find_model(self, name: str | None) -> ModelServices:
        """Return what requests to the model of this name share; None: to the first one. Raises UnknownModel."""
        return self.models.find(name)

    async def awake_model(self, name: str | None, request_class: RequestClass) -> ModelServices:
        """Return what `find_model` does, after the model has been loaded if it sleeps. Raises also Unavailable."""
        return await self.models.awake(name, request_class, self.line, self.config.load_patience_s)

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
        is_read = not isinstance(tokenizer, TokenizerOnUse)  # else any token probes as well
        begins = tokenizer.bos_token_id if is_read else None
        return ModelServices(
            model=model,
            backend=backend,
            tokenizer=tokenizer,
            grammars=GrammarChecker(tokenizer, model.eos_token_ids),
            metrics=self.metrics.add_model(
                model.name, backend, deployment_id, partial(default_slo_at, self.config, backend)
            ),
            readiness_probe=ReadinessProbe(backend, token_id=begins or 0, reply_to=self.reply_to),
            config=self.config,
            limiter=self.limiter,
            lanes=self.lanes,
            pictures=self.pictures,
            reply_to=self.reply_to,
            prefix_hasher=prefix_hasher,
            adapters=adapters,
            timelines=self.timelines,
            usage=self.usage,
        )


def make_exporter(observing: Observing, gateway: str) -> TraceExporter | None:
    if observing.tracing.endpoint is None:
        return None
    return TraceExporter(observing.tracing, gateway, dict(observing.headers))


def make_timelines(observing: Observing, exporter: TraceExporter | None) -> Timelines:
    if exporter is None:
        return Timelines(observing.explain)
    return Timelines(observing.explain, traced_ratio=observing.tracing.sample_ratio, trace=exporter.add)
