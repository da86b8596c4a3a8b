"""The sections of the workers and of their engine."""

import re

from alignedserve.config.sections.base import MIB, Section


class PrefillWorkerConfig(Section, frozen=True):
    """Separate workers for prompts; elastic workers lend each other candidate buffers too."""

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
    """Workers for decodes; elastic and colocated workers compute prompts as well."""

    count: int = 1  # in the whole cluster; when unset by what each node has
    standby: int = 0  # of each node that has some: workers beyond these, loaded and idle, for when one is lost; on CPUs
    kv_cache_bytes: int = 256 * MIB  # block storage
    max_running_requests: int = 64  # largest batch
    # Elastic and colocated: decodes and prefill chunks of one iteration.
    max_num_batched_tokens: int = 512
    # Elastic and colocated: requests beyond those in an iteration, for the policy to choose from.
    max_waiting_requests: int = 1024
    # Host memory for caches that a policy swaps out; 0: none.
    swap_space_bytes: int = 128 * MIB
    # Elastic and colocated: memory of each node in which decodes wait while others need their worker's; 0: none.
    pool_bytes: int = 0
    swap_format: str = "exact"  # swapped caches exactly, or int8: keys and values rounded per channel

    def __post_init__(self) -> None:
        self._require(1 <= self.count <= 1024, "count", "must be between 1 and 1024")
        self._require_positive("kv_cache_bytes", "max_running_requests", "max_num_batched_tokens")
        self._require(0 <= self.standby <= 16, "standby", "must be between 0 and 16")
        self._require(self.max_waiting_requests >= 0, "max_waiting_requests", "must be at least 0")
        self._require(self.swap_space_bytes >= 0, "swap_space_bytes", "must be at least 0")
        self._require(self.pool_bytes >= 0, "pool_bytes", "must be at least 0")
        self._require(self.swap_format in ("exact", "int8"), "swap_format", "must be exact or int8")

    @property
    def has_int8_swaps(self) -> bool:
        return self.swap_format == "int8"


class EngineConfig(Section, frozen=True):
    """Settings that all workers and the pool must agree on."""

    # Token slots per block; when unset 16, and more where blocks hold recurrent states, which each of them has.
    block_size: int = 16
    threads_per_worker: int | None = None  # CPU threads; when unset the workers of a machine share its cores
    # auto (GPUs that pass a self-check, else the CPU), cpu, cuda (a GPU per worker, shared if they are fewer), cuda:N
    device: str = "auto"
    tensor_parallel: int = (
        1  # ranks of each worker, which compute the model together, each on cores or a GPU of its own
    )
    # Stages of each worker, which compute layers of their own one after another; on several hosts each on one of them.
    pipeline_parallel: int = 1
    # Processes of each worker that share a mixture's experts, whole ones each; the rest of the model is in the first.
    expert_parallel: int = 1
    attention_backend: str = (
        "auto"  # native kernels (amx, avx512bf16, avx2, plain), triton on a GPU, or torch; auto: the best here
    )
    # Tokens that a grammar forces are computed several in one iteration; when unset, on CPUs, where it is measured.
    jump_ahead: bool | None = None
    # Tokens are guessed from what prompt and answer said before, and verified several at once: the same answers, sooner
    # where they repeat something. Elastic workers on CPUs.
    speculation: bool = False
    calibration_s: float = 2.0  # of measuring what iterations cost, at a worker's start; 0: it learns while it serves
    # How blocks travel between prefill and decode workers: auto, shm, tcp, gloo; between GPUs of a host also cuda_ipc.
    kv_transport: str = "auto"
    # Of keys and values: auto (the model's dtype), or with a scale per token and head: int8 on CPUs, fp8 on GPUs.
    kv_cache_dtype: str = "auto"
    # Of layers with a sliding window: whole (all keys and values, as of other layers), ring (those of the window alone,
    # in blocks that each request has), or auto: ring where ordinary requests take no more so, and long ones far less.
    window_cache: str = "auto"
    # Of a device that several workers share, the least that iterations without a real-time request keep while another
    # model has one, or another worker of this one a prompt, where threads are more than cores; 1: they never give way.
    best_effort_share: float = 0.1

    def __post_init__(self) -> None:
        self._require(0.0 < self.best_effort_share <= 1.0, "best_effort_share", "must be above 0 and at most 1")
        is_power = self.block_size.bit_count() == 1
        self._require(is_power and 8 <= self.block_size <= 1024, "block_size", "must be a power of two from 8 to 1024")
        self._require(
            self.threads_per_worker is None or self.threads_per_worker > 0, "threads_per_worker", "must be above 0"
        )
        self._require(1 <= self.tensor_parallel <= 64, "tensor_parallel", "must be between 1 and 64")
        self._require(1 <= self.pipeline_parallel <= 64, "pipeline_parallel", "must be between 1 and 64")
        self._require(1 <= self.expert_parallel <= 64, "expert_parallel", "must be between 1 and 64")
        levels = ("auto", "amx", "avx512bf16", "avx2", "plain", "triton", "torch")
        self._require(self.attention_backend in levels, "attention_backend", f"must be one of {', '.join(levels)}")
        self._require(0.0 <= self.calibration_s <= 600.0, "calibration_s", "must be between 0 and 600")
        transports = ("auto", "shm", "tcp", "gloo", "cuda_ipc")
        self._require(self.kv_transport in transports, "kv_transport", f"must be one of {', '.join(transports)}")
        self._require(
            self.device != "cpu" or self.kv_transport != "cuda_ipc",
            "kv_transport",
            "is cuda_ipc, which moves blocks between GPUs, but device is cpu",
        )
        kv_cache_dtypes = ("auto", "int8", "fp8")
        self._require(
            self.kv_cache_dtype in kv_cache_dtypes, "kv_cache_dtype", f"must be one of {', '.join(kv_cache_dtypes)}"
        )
        window_caches = ("auto", "whole", "ring")
        self._require(self.window_cache in window_caches, "window_cache", f"must be one of {', '.join(window_caches)}")
        is_device = re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is not None
        self._require(is_device, "device", "must be auto, cpu, cuda or cuda:N")

    @property
    def num_processes(self) -> int:
        """Return how many processes compute a worker's steps: its ranks, or its stages."""
        return self.tensor_parallel * self.pipeline_parallel
