"""vLLM's objects as plain ones, with the names that the plugin touches and nothing else."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from plugins.vllm import names

FCFS = "fcfs"


class Queue(deque[Any]):
    """vLLM's queue of waiting requests."""

    def remove_requests(self, requests: list[Any]) -> None:
        kept = [request for request in self if request not in requests]
        self.clear()
        self.extend(kept)

    def prepend_requests(self, requests: list[Any]) -> None:
        self.extendleft(requests)


@dataclass(eq=False)
class StandInRequest:
    """A request, as recorded."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int = 100
    priority: int = 0
    arrival_time: float = 0.0
    xargs: dict[str, Any] = field(default_factory=dict)
    status: Any = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_output_placeholders: int = 0
    num_stale_output_tokens: int = 0
    drop_stale_output: bool = False
    resumable: bool = False
    spec_token_ids: tuple[int, ...] = ()
    lora_request: Any = None

    def __post_init__(self) -> None:
        self.status = SimpleNamespace(name=self.status or "WAITING")

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(extra_args=self.xargs)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class StandInScheduler:
    """A scheduler with these requests; it preempts as vLLM does."""

    def __init__(self, *requests: StandInRequest, num_blocks: int = 1000, max_loras: int = 0) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.running = [request for request in requests if names.is_running(request)]
        self.waiting = Queue(request for request in requests if not names.is_running(request))
        self.kv_holding_waiting, self.deferred_waiting = Queue(), set[Any]()
        self.block_size, self.max_model_len = 16, 4096
        used = sum(-(-request.num_computed_tokens // 16) for request in requests)
        pool = SimpleNamespace(num_gpu_blocks=num_blocks, get_num_free_blocks=lambda: num_blocks - used)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.max_num_running_reqs = self.max_num_active_reqs = 64
        self.max_num_scheduled_tokens = 2048
        self.num_spec_tokens, self.num_sampled_tokens_per_step = 0, 1
        self.lora_config = SimpleNamespace(max_loras=max_loras) if max_loras else None
        self.scheduler_config = SimpleNamespace(enable_chunked_prefill=True, long_prefill_token_threshold=0)
        self.vllm_config = SimpleNamespace(additional_config={})
        self.adaptive_long_prefill_threshold = self.requires_kv_delivery = self.use_pp = False
        self.policy = "priority"
        self._alignedserve_fcfs = (Queue, FCFS)
        self.preempted: list[str] = []

    def schedule(self, throttle_prefills: bool = False) -> None: ...

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...

    def _request_blocks_can_be_freed(self, request: StandInRequest) -> bool:
        return True

    def _preempt_request(self, request: StandInRequest, timestamp: float, drop_stale_output: bool = False) -> None:
        request.status = SimpleNamespace(name="PREEMPTED")
        request.num_computed_tokens = 0
        self.preempted.append(request.request_id)
        self.waiting.appendleft(request)


@dataclass(frozen=True)
class StandInOutput:
    """What a step computes."""

    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: frozenset[str] = frozenset()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())
