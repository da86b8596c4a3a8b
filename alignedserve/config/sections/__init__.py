"""The configuration: one frozen section per component, checked when it is made.

A component receives its own section, never the whole. Every wrong value raises ConfigError naming the field.
"""

from alignedserve.config.sections.base import MIB, Section
from alignedserve.config.sections.batches import BatchesConfig
from alignedserve.config.sections.cluster import (
    ClusterConfig,
    ExplainConfig,
    LinksConfig,
    Observing,
    RecordingConfig,
    ScalingConfig,
    Topology,
    TracingConfig,
)
from alignedserve.config.sections.gateway import AUTO, GatewayConfig
from alignedserve.config.sections.model import (
    REASONING_FORMATS,
    SAMPLING_FIELDS,
    TOOL_FORMATS,
    LoraConfig,
    ModelSectionConfig,
    PoolConfig,
    PrefixCacheConfig,
)
from alignedserve.config.sections.scheduling import BatchingConfig, RouterConfig, SchedulingConfig
from alignedserve.config.sections.workers import DecodeWorkerConfig, EngineConfig, PrefillWorkerConfig

__all__ = [
    "AUTO",
    "BatchesConfig",
    "BatchingConfig",
    "ClusterConfig",
    "DecodeWorkerConfig",
    "EngineConfig",
    "ExplainConfig",
    "GatewayConfig",
    "LinksConfig",
    "LoraConfig",
    "MIB",
    "ModelSectionConfig",
    "Observing",
    "PoolConfig",
    "PrefillWorkerConfig",
    "PrefixCacheConfig",
    "REASONING_FORMATS",
    "RecordingConfig",
    "RouterConfig",
    "SAMPLING_FIELDS",
    "ScalingConfig",
    "SchedulingConfig",
    "Section",
    "TOOL_FORMATS",
    "Topology",
    "TracingConfig",
]
