"""The configuration: one frozen section per component, checked when it is made.

A component receives its own section, never the whole. Every wrong value raises ConfigError naming the field.
"""

import enum
import re
from typing import Any

import msgspec

from alignedserve.core.errors import ConfigError

MIB = 1024 * 1024
# Names of alignedserve.gateway.tools.formats and alignedserve.gateway.reasoning.formats, which stand on a higher floor.
TOOL_FORMATS = (
    "smollm2",
    "functionary",
    "deepseek_v31",
    "mistral_args",
    "mistral",
    "hermes",
    "llama3_json",
    "json",
)
REASONING_FORMATS = ("think", "magistral", "seed_oss", "command_a")
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.=-]+)*/?")


class Topology(enum.Enum):
    """Workers that do both phases and hand requests over, such as keep them, or separate ones with a pool between."""

    ELASTIC = "elastic"
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"

    @property
    def is_separate(self) -> bool:
        """True if prompts and decodes have workers of their own, with a pool between them."""
        return self is Topology.DISAGGREGATED


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
    """Model to serve, and its form."""

    path: str = "pocket"  # a Hugging Face folder, ORG/NAME on a hub, or "pocket" for the model that ships
    served_model_name: str | None = None  # the name clients use; the folder's name when unset
    dtype: str = "auto"  # float32, bfloat16, float16; auto: bfloat16 where it is multiplied natively, else float32
    quantization: str | None = None  # int8: linear layers with weights of 8 bits, less exact
    max_context_len: int | None = None  # tokens; when unset the model's own limit, or less where memory is short
    random_weights: bool = False  # serve a config.json without weights, for benchmarks
    chat_template: str | None = None  # a file with a jinja2 template to use instead of the model's own
    tool_format: str | None = None  # how the model writes tool calls; when unset found from its chat template
    reasoning_format: str | None = None  # how it marks a thought; when unset found from its chat template

    @classmethod
    def _section_name(cls) -> str:
        return "model"

    def __post_init__(self) -> None:
        self._require(bool(self.path), "path", "must name a model folder")
        known = ("auto", "float32", "bfloat16", "float16")
        self._require(self.dtype in known, "dtype", f"must be one of {', '.join(known)}")
        self._require(self.quantization in (None, "int8"), "quantization", "must be int8 or unset")
        self._require(self.max_context_len is None or self.max_context_len > 1, "max_context_len", "must exceed 1")
        for field, names in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            is_known = getattr(self, field) in (None, *names)
            self._require(is_known, field, f"must be one of {', '.join(names)}, or unset")


class GatewayConfig(Section, frozen=True):
    """HTTP gateway."""

    host: str = "127.0.0.1"
    port: int = 8000
    count: int = 1  # gateways; the n-th of a host listens on port + n; when unset one on each node
    max_body_bytes: int = 4 * MIB
    max_json_depth: int = 32
    max_choices: int = 16  # the largest n
    max_stop_strings: int = 16
    max_concurrent_requests: int = 1024
    requests_per_minute: int | None = None  # per key; 429 above
    strict: bool = False  # unknown fields are refused; otherwise ignored, and named by a header of the response
    first_token_timeout_s: float = 120.0  # accepted but silent: the request fails
    token_timeout_s: float = 60.0  # longest silence within an answer
    max_responses_bytes: int = 100_000_000  # stored responses of one key; its oldest ones make room
    max_response_turns: int = 256  # stored responses that one more may continue
    response_lifetime_s: float = 30 * 24 * 3600.0  # of a stored response

    def __post_init__(self) -> None:
        self._require(0 < self.port < 65536, "port", "must be a TCP port")
        self._require(1 <= self.count <= 64, "count", "must be between 1 and 64")
        self._require(self.port + self.count <= 65536, "count", "needs as many ports from gateway.port on")
        self._require_positive("max_body_bytes", "max_json_depth", "max_choices", "max_stop_strings")
        self._require_positive("max_concurrent_requests", "first_token_timeout_s", "token_timeout_s")
        self._require_positive("max_responses_bytes", "max_response_turns", "response_lifetime_s")
        self._require(
            self.requests_per_minute is None or self.requests_per_minute > 0, "requests_per_minute", "must be above 0"
        )


class RouterConfig(Section, frozen=True):
    """Admission, queues, placement."""

    max_queued_requests: int = 1024
    max_queued_tokens: int = 2_000_000
    prefill_order: str | None = None  # name of an order in router/policies; the policy's own when unset
    direct_handoff: bool | None = None  # prefills go straight to decode workers; as the policy has it when unset
    # Of separate workers: tokens handed to one to prefill, the rest waits in the router; requests granted to a decode
    # worker ahead of need. Others are given what they have places for (decode.max_waiting_requests).
    max_prefill_tokens_per_worker: int = 8192
    max_candidate_requests: int = 16
    max_retries: int = 3  # after that a request fails
    length_predictor: str = "hashed_ngrams"  # a name in router/prediction
    sentence_encoder: str | None = None  # folder of a BERT-like encoder, for the length predictor of that name

    def __post_init__(self) -> None:
        self._require_positive("max_queued_requests", "max_queued_tokens", "max_prefill_tokens_per_worker")
        self._require_positive("max_candidate_requests")
        self._require(self.max_retries >= 0, "max_retries", "must be at least 0")


class PoolConfig(Section, frozen=True):
    """KV pool in CPU memory, one per node, where prompts and decodes have workers of their own."""

    memory_bytes: int = 256 * MIB
    lease_s: float = 30.0  # a lease not used within this time is taken back

    def __post_init__(self) -> None:
        self._require_positive("memory_bytes", "lease_s")


class SchedulingConfig(Section, frozen=True):
    """Scheduling policy, from the queue to the iteration."""

    policy: str = "aligned_slo"  # name of a policy in alignedserve/scheduling/policies
    policy_params: dict[str, Any] = msgspec.field(default_factory=dict)  # parameters of that policy, by name

    def __post_init__(self) -> None:
        self._require(bool(self.policy), "policy", "must name a policy")


class BatchingConfig(Section, frozen=True):
    """Formation of decode batches (AlignedServe, sections 3.3 and 4.1), for router, pool and decode workers."""

    policy: str | None = None  # name of a batch former in kvpool/policies; the scheduling policy's own when unset
    min_requests: int = 36  # a batch of fewer does not saturate a decode worker
    low_running_share: float = 0.75  # with fewer of a worker's places and blocks taken, its next batch takes over
    max_block_share: float = 0.4  # of a decode worker's blocks, for what is granted to it ahead of need
    starvation_s: float = 2.0  # lengths that were in no batch for this long go first

    def __post_init__(self) -> None:
        self._require_positive("min_requests", "starvation_s")
        for share in ("low_running_share", "max_block_share"):
            self._require(0.0 < getattr(self, share) <= 1.0, share, "must be above 0 and at most 1")

    @property
    def is_aligned(self) -> bool:
        """Return whether batches are of similar length; otherwise none is worth keeping apart."""
        return self.policy != "fcfs"

    def enough_requests(self, max_running_requests: int) -> int:
        """Return the fewest requests worth a switch of batches: at most half of `max_running_requests`."""
        return min(self.min_requests, max(max_running_requests // 2, 1)) if self.is_aligned else 1


class PrefillWorkerConfig(Section, frozen=True):
    """Workers that compute prompts, where they are separate; elastic ones lend each other candidate buffers too."""

    count: int = 1  # in the whole cluster; when unset by what each node has
    kv_cache_bytes: int = 128 * MIB  # block storage
    # Candidate buffers of the decode workers, shared out evenly; 0: none.
    candidate_buffer_bytes: int = 64 * MIB
    max_running_requests: int = 16  # requests in work at a time
    max_num_batched_tokens: int = 512  # chunk budget

    def __post_init__(self) -> None:
        self._require(1 <= self.count <= 1024, "count", "must be between 1 and 1024")
        self._require_positive("kv_cache_bytes", "max_running_requests", "max_num_batched_tokens")
        self._require(self.candidate_buffer_bytes >= 0, "candidate_buffer_bytes", "must be at least 0")


class DecodeWorkerConfig(Section, frozen=True):
    """Workers that generate; elastic and colocated ones compute prompts as well."""

    count: int = 1  # in the whole cluster; when unset by what each node has
    kv_cache_bytes: int = 256 * MIB  # block storage
    max_running_requests: int = 64  # largest batch
    # Elastic and colocated: decodes and prefill chunks of one iteration.
    max_num_batched_tokens: int = 512
    # Elastic and colocated: requests beyond those in an iteration, for the policy to choose from.
    max_waiting_requests: int = 1024
    # Host memory for caches that a policy swaps out; 0: none.
    swap_space_bytes: int = 128 * MIB
    swap_format: str = "exact"  # those caches as they are, or int8: keys and values rounded per channel

    def __post_init__(self) -> None:
        self._require(1 <= self.count <= 1024, "count", "must be between 1 and 1024")
        self._require_positive("kv_cache_bytes", "max_running_requests", "max_num_batched_tokens")
        self._require(self.max_waiting_requests >= 0, "max_waiting_requests", "must be at least 0")
        self._require(self.swap_space_bytes >= 0, "swap_space_bytes", "must be at least 0")
        self._require(self.swap_format in ("exact", "int8"), "swap_format", "must be exact or int8")

    @property
    def has_int8_swaps(self) -> bool:
        """Return whether caches in host memory are rounded to 8 bits."""
        return self.swap_format == "int8"


class EngineConfig(Section, frozen=True):
    """Settings that all workers and the pool must agree on."""

    block_size: int = 16  # token slots per block
    threads_per_worker: int | None = None  # CPU threads; when unset the workers of a machine share its cores
    device: str = "auto"  # auto (the CPU so far), cpu, cuda (a GPU per worker, shared where they are fewer), cuda:N
    attention_backend: str = (
        "auto"  # native kernels (avx512bf16, avx2, plain), triton on a GPU, or torch; auto: the best here
    )
    calibration_s: float = 2.0  # of measuring what iterations cost, at a worker's start; 0: it learns while it serves
    kv_transport: str = "auto"  # how blocks travel between prefill and decode workers: auto, shm, tcp or gloo
    kv_cache_dtype: str = (
        "auto"  # of keys and values: auto (the model's dtype), or int8 with a scale per token and head
    )

    def __post_init__(self) -> None:
        self._require(self.block_size in (8, 16, 32, 64, 128), "block_size", "must be 8, 16, 32, 64 or 128")
        self._require(
            self.threads_per_worker is None or self.threads_per_worker > 0, "threads_per_worker", "must be above 0"
        )
        levels = ("auto", "avx512bf16", "avx2", "plain", "triton", "torch")
        self._require(self.attention_backend in levels, "attention_backend", f"must be one of {', '.join(levels)}")
        self._require(0.0 <= self.calibration_s <= 600.0, "calibration_s", "must be between 0 and 600")
        self._require(
            self.kv_transport not in ("cuda_ipc", "nccl"),
            "kv_transport",
            f"must be auto, shm, tcp or gloo ({self.kv_transport} is not served yet: "
            "candidate buffers lie in host memory)",
        )
        self._require(
            self.kv_transport in ("auto", "shm", "tcp", "gloo"), "kv_transport", "must be auto, shm, tcp or gloo"
        )
        kv_cache_dtypes = ("auto", "int8")
        self._require(
            self.kv_cache_dtype in kv_cache_dtypes, "kv_cache_dtype", f"must be one of {', '.join(kv_cache_dtypes)}"
        )
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is not None
        self._require(is_device, "device", "must be auto, cpu, cuda or cuda:N")


class LinksConfig(Section, frozen=True):
    """Sockets between processes."""

    peer_timeout_s: float = 5.0  # a peer silent for this long is lost
    hang_timeout_s: float = 20.0  # a process that has answered nothing for this long is ended and started again
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


class BatchesConfig(Section, frozen=True):
    """Files and batches of best-effort lines. Their Redis is the cluster's own unless ALIGNEDSERVE_REDIS_URL names
    one."""

    enabled: bool = True
    # State that outlives restarts, on the head; when unset one per port, under the user's state folder.
    # s3://BUCKET/PREFIX: contents of files are there, and all else in that folder.
    folder: str | None = None
    s3_endpoint: str | None = None  # of a bucket that is not Amazon's, http(s)://HOST:PORT
    namespace: str = "alignedserve"  # what keys in a shared Redis begin with
    max_file_bytes: int = 200_000_000
    max_files_bytes: int = 10_000_000_000  # of all input files of one key
    max_files: int = 1000  # of one key
    max_lines: int = 50_000  # of one batch
    max_line_bytes: int = 4 * MIB
    max_active: int = 100  # batches of one key that are not over
    max_in_flight: int | None = None  # lines in the cluster at a time; when unset twice what decode workers run
    assumed_tokens_per_s: float = 500.0  # for quotes, until lines have run and their rate is known
    max_attempts: int = 8  # of a line that was taken and did not come to an end
    file_lifetime_s: float = 30 * 24 * 3600.0  # of a file without `expires_after`

    def __post_init__(self) -> None:
        self._require(self.folder is None or bool(self.folder), "folder", "must name a folder")
        is_place = "://" not in (self.folder or "") or bool(_BUCKET.fullmatch(self.folder or ""))
        self._require(is_place, "folder", "must be a folder or s3://BUCKET/PREFIX")
        is_url = self.s3_endpoint is None or bool(re.fullmatch(r"https?://[^/\s@]+/?", self.s3_endpoint))
        self._require(is_url, "s3_endpoint", "must be http(s)://HOST:PORT, without credentials")
        self._require(self.s3_endpoint is None or self.is_in_bucket, "s3_endpoint", "needs a bucket in batches.folder")
        self._require(bool(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.namespace)), "namespace", "must be a plain word")
        self._require_positive("max_file_bytes", "max_files_bytes", "max_files", "max_lines", "max_line_bytes")
        self._require_positive("max_active", "max_attempts", "file_lifetime_s", "assumed_tokens_per_s")
        self._require(self.max_in_flight is None or self.max_in_flight > 0, "max_in_flight", "must be above 0")

    @property
    def is_in_bucket(self) -> bool:
        """Return whether contents of files are objects in a bucket."""
        return self.folder is not None and self.folder.startswith("s3://")


class ScalingConfig(Section, frozen=True):
    """Nodes that Ray's autoscaler adds and removes with the load, on a cluster of several hosts."""

    max_nodes: int | None = None  # with the head; unset: the nodes are those that there are
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


class PrefixCacheConfig(Section, frozen=True):
    """Blocks of contexts that later requests with the same beginning reuse instead of computing them again."""

    enabled: bool = True
    # Memory of a node, beside that of its workers, for blocks that they share and that outlive one; 0: none. When unset
    # as much as its workers have, from what is free, where there are several.
    host_bytes: int = 0
    shared_between_keys: bool = False  # API keys share each other's blocks; False: each key its own only

    def __post_init__(self) -> None:
        self._require(self.host_bytes >= 0, "host_bytes", "must be at least 0")

    @property
    def pool_bytes(self) -> int:
        """Return the memory of a node's pool for prefix blocks; 0: it keeps none."""
        return int(self.host_bytes) if self.enabled else 0


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
        """Return how many workers hold the weights: those that decode and, where they are separate, that prefill."""
        return self.decode.count + (self.prefill.count if self.chosen_topology.is_separate else 0)
