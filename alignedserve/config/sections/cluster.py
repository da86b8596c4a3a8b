"""The whole configuration: every section, and the topology."""

import enum
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from alignedserve.config.sections.base import MIB, Section
from alignedserve.config.sections.batches import BatchesConfig
from alignedserve.config.sections.gateway import GatewayConfig
from alignedserve.config.sections.model import LoraConfig, ModelSectionConfig, PoolConfig, PrefixCacheConfig
from alignedserve.config.sections.scheduling import BatchingConfig, RouterConfig, SchedulingConfig
from alignedserve.config.sections.workers import DecodeWorkerConfig, EngineConfig, PrefillWorkerConfig


class ExplainConfig(Section, frozen=True):
    """Courses of requests, which gateways keep for `alignedserve explain`."""

    enabled: bool = True
    keep_s: float = 3600.0  # after the end of a request
    max_requests: int = 20_000  # of one gateway; the oldest that have ended make room
    max_bytes: int = 64 * MIB  # likewise

    def __post_init__(self) -> None:
        self._require(0.0 < self.keep_s <= 7 * 86_400.0, "keep_s", "must be above 0 and at most 604800")
        self._require_positive("max_requests", "max_bytes")


class TracingConfig(Section, frozen=True):
    """Traces of OpenTelemetry, sent by gateways with OTLP over HTTP."""

    endpoint: str | None = None  # of a collector, such as http://127.0.0.1:4318; unset: no traces
    sample_ratio: float = 1.0  # of requests whose client does not say whether they are traced
    service_name: str = "alignedserve"
    timeout_s: float = 10.0  # of sending a message, all tries together
    max_queued_requests: int = 2048  # waiting to be sent; traces beyond are dropped, and counted

    def __post_init__(self) -> None:
        self._require(self.endpoint is None or _is_url(self.endpoint), "endpoint", "must be an http or https URL")
        self._require(0.0 <= self.sample_ratio <= 1.0, "sample_ratio", "must be between 0 and 1")
        self._require(0 < len(self.service_name) <= 200, "service_name", "must have 1 to 200 characters")
        self._require(0.1 <= self.timeout_s <= 60.0, "timeout_s", "must be between 0.1 and 60")
        self._require(1 <= self.max_queued_requests <= 100_000, "max_queued_requests", "must be between 1 and 100000")


@dataclass(frozen=True, slots=True)
class Observing:
    """What a gateway gets of both, with the headers (secrets, perhaps) that the collector wants."""

    explain: ExplainConfig = field(default_factory=ExplainConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def is_on(self) -> bool:
        return self.explain.enabled or self.tracing.endpoint is not None


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class LinksConfig(Section, frozen=True):
    """Sockets between processes."""

    peer_timeout_s: float = 5.0  # a peer silent for this long is lost
    hang_timeout_s: float = 20.0  # a process that has answered nothing for this long is ended and started again
    restart_on_node_loss: bool = True  # on one host, when Ray is lost there; false: `serve` ends with exit code 75
    transport: str = "unix"  # between processes of one host
    tls: bool = (
        True  # between hosts, with certificates that the cluster makes; false: in clear, on a network of its own
    )

    def __post_init__(self) -> None:
        self._require(0.5 <= self.peer_timeout_s <= 3600.0, "peer_timeout_s", "must be between 0.5 and 3600")
        self._require(self.hang_timeout_s >= 2.0, "hang_timeout_s", "must be at least 2")
        self._require(self.transport == "unix", "transport", "must be unix: between hosts links.tls decides")


class RecordingConfig(Section, frozen=True):
    """Recording of every component's decisions, for `alignedserve replay`."""

    folder: str | None = None  # on every node, empty or absent at the start; unset: nothing is recorded
    tokens: bool = False  # keep the tokens of prompts and answers; False: only what decisions depend on
    commands: bool = False  # keep what was decided, not only its digest
    max_bytes: int = 1024 * MIB  # of one process; its recording then ends, and it goes on

    def __post_init__(self) -> None:
        self._require(self.folder is None or bool(self.folder), "folder", "must name a folder")
        self._require_positive("max_bytes")


class ScalingConfig(Section, frozen=True):
    """Nodes that Ray's autoscaler adds and removes with the load, on a cluster of several hosts."""

    max_nodes: int | None = None  # with the head; unset: no nodes are added or removed
    min_nodes: int = 1
    target_load: float = 0.8  # real-time requests per place of a decode worker; above it nodes are added
    max_wait_s: float = 5.0  # forecast for queued real-time requests; above it nodes are added
    up_after_s: float = 3.0  # nodes are added when they were wanted for this long
    down_after_s: float = 300.0  # a node is given back when it was not wanted for this long

    def __post_init__(self) -> None:
        self._require(1 <= self.min_nodes <= 10_000, "min_nodes", "must be between 1 and 10000")
        is_range = self.max_nodes is None or self.min_nodes <= self.max_nodes <= 10_000
        self._require(is_range, "max_nodes", "must be between scaling.min_nodes and 10000")
        self._require(0.0 < self.target_load <= 10.0, "target_load", "must be above 0 and at most 10")
        self._require(1.0 <= self.max_wait_s <= 120.0, "max_wait_s", "must be between 1 and 120")
        self._require(0.0 <= self.up_after_s <= 3600.0, "up_after_s", "must be between 0 and 3600")
        is_later = self.up_after_s <= self.down_after_s <= 86_400.0
        self._require(is_later, "down_after_s", "must be between scaling.up_after_s and 86400")


class Topology(enum.Enum):
    """Workers of both phases with handover (elastic) or without (colocated), or separate workers around a pool."""

    ELASTIC = "elastic"
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"

    @property
    def is_separate(self) -> bool:
        return self is Topology.DISAGGREGATED


class ClusterConfig(Section, frozen=True):
    """The whole file. Only the CLI and the cluster builder see it whole."""

    topology: Topology | None = None  # when unset the policy's own, of the default one elastic (scheduling/factory.py)
    model: ModelSectionConfig = msgspec.field(default_factory=ModelSectionConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)
    scheduling: SchedulingConfig = msgspec.field(default_factory=SchedulingConfig)
    batching: BatchingConfig = msgspec.field(default_factory=BatchingConfig)
    pool: PoolConfig = msgspec.field(default_factory=PoolConfig)
    prefill: PrefillWorkerConfig = msgspec.field(default_factory=PrefillWorkerConfig)
    decode: DecodeWorkerConfig = msgspec.field(default_factory=DecodeWorkerConfig)
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    links: LinksConfig = msgspec.field(default_factory=LinksConfig)
    recording: RecordingConfig = msgspec.field(default_factory=RecordingConfig)
    batches: BatchesConfig = msgspec.field(default_factory=BatchesConfig)
    scaling: ScalingConfig = msgspec.field(default_factory=ScalingConfig)
    prefix_cache: PrefixCacheConfig = msgspec.field(default_factory=PrefixCacheConfig)
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)
    explain: ExplainConfig = msgspec.field(default_factory=ExplainConfig)
    tracing: TracingConfig = msgspec.field(default_factory=TracingConfig)

    @property
    def chosen_topology(self) -> Topology:
        """Return the topology; elastic while it is unset and the policy has not been asked."""
        return self.topology or Topology.ELASTIC

    @property
    def node_pool(self) -> PoolConfig | None:
        """Return the pool of each node, with the memory for all that it keeps; None: it keeps nothing. It keeps
        requests on their way between separate workers or decodes of others, prefix blocks, or both."""
        requests_bytes = self.pool.memory_bytes if self.chosen_topology.is_separate else self.decode.pool_bytes
        memory_bytes = requests_bytes + self.prefix_cache.pool_bytes
        return msgspec.structs.replace(self.pool, memory_bytes=memory_bytes) if memory_bytes else None

    @property
    def num_workers(self) -> int:
        """Return how many workers hold the weights: all that decode, stand by or, where they are separate, prefill."""
        num_prefill = self.prefill.count if self.chosen_topology.is_separate else 0
        return self.decode.count + self.decode.standby + num_prefill
