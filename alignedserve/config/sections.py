"""The configuration: one frozen section per component, checked when it is made.

A component receives its own section, never the whole. Every wrong value raises ConfigError naming the field.
"""

import enum
import re
from typing import Any

import msgspec

from alignedserve.core.errors import ConfigError

MIB = 1024 * 1024


class Topology(enum.Enum):
    """Separate prefill and decode workers, or workers that do both."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""

    def _require(self, holds: bool, field: str, problem: str) -> None:
        if not holds:
            raise ConfigError(f"{self._section_name()}.{field} {problem} (it is {getattr(self, field)!r})")

    @classmethod
    def _section_name(cls) -> str:
        name = cls.__name__.removesuffix("Config").removesuffix("Worker")
        return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()

    def _require_positive(self, *fields: str) -> None:
        for field in fields:
            self._require(getattr(self, field) > 0, field, "must be above 0")


class ModelSectionConfig(Section, frozen=True):
    """Which model, and in which form."""

    path: str = "pocket"  # a Hugging Face folder, or "pocket" for the model that ships with the package
    served_name: str | None = None  # the name clients use; the folder's name when unset
    dtype: str = "auto"  # float32 on CPU unless named: float32, bfloat16, float16
    max_context_len: int | None = None  # tokens; the model's own limit when unset
    random_weights: bool = False  # serve a config.json without weights, for benchmarks

    @classmethod
    def _section_name(cls) -> str:
        return "model"

    def __post_init__(self) -> None:
        self._require(bool(self.path), "path", "must name a model folder")
        known = ("auto", "float32", "bfloat16", "float16")
        self._require(self.dtype in known, "dtype", f"must be one of {', '.join(known)}")
        self._require(self.max_context_len is None or self.max_context_len > 1, "max_context_len", "must exceed 1")


class GatewayConfig(Section, frozen=True):
    """The HTTP door."""

    host: str = "127.0.0.1"
    port: int = 8000
    count: int = 1  # gateways; the n-th listens on port + n
    max_body_bytes: int = 4 * MIB
    max_json_depth: int = 32
    max_choices: int = 16  # the largest n
    max_stop_strings: int = 16
    max_concurrent_requests: int = 1024
    requests_per_minute: int | None = None  # per key; 429 above
    first_token_timeout_s: float = 120.0  # accepted but silent: the request fails
    token_timeout_s: float = 60.0  # longest silence within an answer

    def __post_init__(self) -> None:
        self._require(0 < self.port < 65536, "port", "must be a TCP port")
        self._require(1 <= self.count <= 64, "count", "must be between 1 and 64")
        self._require(self.port + self.count <= 65536, "count", "needs as many ports from gateway.port on")
        self._require_positive("max_body_bytes", "max_json_depth", "max_choices", "max_stop_strings")
        self._require_positive("max_concurrent_requests", "first_token_timeout_s", "token_timeout_s")
        self._require(
            self.requests_per_minute is None or self.requests_per_minute > 0, "requests_per_minute", "must be above 0"
        )


class RouterConfig(Section, frozen=True):
    """Admission, queues, placement."""

    max_queued_requests: int = 1024
    max_queued_tokens: int = 2_000_000
    prefill_order: str = "least_slack"  # name of a policy in router/policies
    max_prefill_tokens_per_worker: int = 8192  # handed to one worker and not yet computed; the rest waits in the router
    candidate_requests: int = 16  # granted to a decode worker ahead of need, at most
    max_requeues: int = 3  # after that a request fails

    def __post_init__(self) -> None:
        self._require_positive("max_queued_requests", "max_queued_tokens", "max_prefill_tokens_per_worker")
        self._require_positive("candidate_requests")
        self._require(self.max_requeues >= 0, "max_requeues", "must be at least 0")


class PoolConfig(Section, frozen=True):
    """KV pool in CPU memory, one per node."""

    memory_bytes: int = 256 * MIB
    lease_s: float = 30.0  # a lease not used within this time is taken back

    def __post_init__(self) -> None:
        self._require_positive("memory_bytes", "lease_s")


class BatchingConfig(Section, frozen=True):
    """How decode batches are formed (AlignedServe, sections 3.3 and 4.1). Router, pool and decode workers get it."""

    policy: str = "density_first"  # name of a batch former in kvpool/policies
    min_requests: int = 36  # a batch of fewer does not saturate a decode worker
    low_running_share: float = 0.75  # with fewer of a decode worker's places taken, its next batch takes over
    max_block_share: float = 0.4  # of a decode worker's blocks, for what is granted to it ahead of need
    starvation_s: float = 2.0  # lengths that were in no batch for this long go first

    def __post_init__(self) -> None:
        self._require_positive("min_requests", "starvation_s")
        for share in ("low_running_share", "max_block_share"):
            self._require(0.0 < getattr(self, share) <= 1.0, share, "must be above 0 and at most 1")

    @property
    def is_aligned(self) -> bool:
        """Whether batches are of similar length; otherwise none is worth keeping apart from others."""
        return self.policy != "fcfs"

    def enough_requests(self, max_running: int) -> int:
        """Requests that make a batch worth a switch, for a worker that runs at most `max_running`: not above half."""
        return min(self.min_requests, max(max_running // 2, 1)) if self.is_aligned else 1


class PrefillWorkerConfig(Section, frozen=True):
    """Workers that compute prompts."""

    count: int = 1
    memory_bytes: int = 128 * MIB  # block storage
    buffer_bytes: int = 64 * MIB  # candidate buffers of the decode workers, shared out evenly; 0: none
    max_running: int = 16  # requests in work at a time
    max_tokens_per_iteration: int = 512  # chunk budget

    def __post_init__(self) -> None:
        self._require(1 <= self.count <= 1024, "count", "must be between 1 and 1024")
        self._require_positive("memory_bytes", "max_running", "max_tokens_per_iteration")
        self._require(self.buffer_bytes >= 0, "buffer_bytes", "must be at least 0")


class DecodeWorkerConfig(Section, frozen=True):
    """Workers that generate; under the colocated topology they compute prompts as well."""

    count: int = 1
    memory_bytes: int = 256 * MIB  # block storage
    max_running: int = 64  # largest batch
    max_tokens_per_iteration: int = 512  # colocated only: decodes and prefill chunks of one iteration

    def __post_init__(self) -> None:
        self._require(1 <= self.count <= 1024, "count", "must be between 1 and 1024")
        self._require_positive("memory_bytes", "max_running", "max_tokens_per_iteration")


class EngineConfig(Section, frozen=True):
    """What all workers and the pool must agree on."""

    block_size: int = 16  # token slots per block
    threads_per_worker: int | None = None  # CPU threads; when unset the workers of a machine share its cores
    device: str = "auto"  # auto, cpu
    kv_transport: str = "auto"  # how blocks go between prefill and decode workers: auto, shm, gloo, cuda_ipc, nccl

    def __post_init__(self) -> None:
        self._require(self.block_size in (8, 16, 32, 64, 128), "block_size", "must be 8, 16, 32, 64 or 128")
        self._require(
            self.threads_per_worker is None or self.threads_per_worker > 0, "threads_per_worker", "must be above 0"
        )
        known = ("auto", "shm", "gloo", "cuda_ipc", "nccl")
        self._require(self.kv_transport in known, "kv_transport", f"must be one of {', '.join(known)}")
        self._require(self.device in ("auto", "cpu"), "device", "must be auto or cpu: CUDA is not built yet")


class LinksConfig(Section, frozen=True):
    """Sockets between processes."""

    peer_timeout_s: float = 5.0  # a peer silent for this long is lost
    transport: str = "unix"  # sockets of one host

    def __post_init__(self) -> None:
        self._require(0.5 <= self.peer_timeout_s <= 3600.0, "peer_timeout_s", "must be between 0.5 and 3600")
        self._require(self.transport == "unix", "transport", "must be unix: links between hosts are not built yet")


class ClusterConfig(Section, frozen=True):
    """The whole file. Only the CLI and the cluster builder see it whole."""

    topology: Topology = Topology.DISAGGREGATED
    model: ModelSectionConfig = msgspec.field(default_factory=ModelSectionConfig)
    gateway: GatewayConfig = msgspec.field(default_factory=GatewayConfig)
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)
    batching: BatchingConfig = msgspec.field(default_factory=BatchingConfig)
    pool: PoolConfig = msgspec.field(default_factory=PoolConfig)
    prefill: PrefillWorkerConfig = msgspec.field(default_factory=PrefillWorkerConfig)
    decode: DecodeWorkerConfig = msgspec.field(default_factory=DecodeWorkerConfig)
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    links: LinksConfig = msgspec.field(default_factory=LinksConfig)


def from_mapping(values: dict[str, Any]) -> ClusterConfig:
    """Build the config from plain values. Raises ConfigError naming the field."""
    try:
        return msgspec.convert(values, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
