"""The whole configuration: every section, and the topology."""

import enum

import msgspec

from alignedserve.config.sections.base import Section
from alignedserve.config.sections.batches import BatchesConfig
from alignedserve.config.sections.caches import PoolConfig, PrefixCacheConfig
from alignedserve.config.sections.gateway import GatewayConfig
from alignedserve.config.sections.hosts import LinksConfig, RecordingConfig, ScalingConfig
from alignedserve.config.sections.lora import LoraConfig
from alignedserve.config.sections.model import ModelSectionConfig
from alignedserve.config.sections.observing import ExplainConfig, TracingConfig
from alignedserve.config.sections.scheduling import BatchingConfig, RouterConfig, SchedulingConfig
from alignedserve.config.sections.workers import DecodeWorkerConfig, EngineConfig, PrefillWorkerConfig


class Topology(enum.Enum):
    """Workers that do both phases and hand requests over, such as keep them, or separate ones with a pool between."""

    ELASTIC = "elastic"
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"

    @property
    def is_separate(self) -> bool:
        """True if prompts and decodes have workers of their own, with a pool between them."""
        return self is Topology.DISAGGREGATED


class ClusterConfig(Section, frozen=True):
    """The whole file. Only the CLI and the cluster builder see it whole."""

    topology: Topology | None = None  # when unset the policy's own, of the default one elastic (scheduling/topology.py)
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
        """Return the pool of each node, with the memory for all that it keeps; None: it keeps nothing.

        It keeps requests on their way between separate workers, prefix blocks, or both.
        """
        requests_bytes = self.pool.memory_bytes if self.chosen_topology.is_separate else 0
        memory_bytes = requests_bytes + self.prefix_cache.pool_bytes
        return msgspec.structs.replace(self.pool, memory_bytes=memory_bytes) if memory_bytes else None

    @property
    def num_workers(self) -> int:
        """Return how many workers hold the weights: all that decode, stand by or, where they are separate, prefill."""
        num_prefill = self.prefill.count if self.chosen_topology.is_separate else 0
        return self.decode.count + self.decode.standby + num_prefill
