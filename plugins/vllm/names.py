"""Every name of vLLM's that the plugin touches, and the versions that have them all.

The other parts use what is listed here: names of the scheduler, of requests, of a step. Other versions are refused: a
scheduler is inside vLLM, and a renamed queue would show as lost requests. To add a version: run `make test-vllm` in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

VERSIONS = ("0.32.0",)

SCHEDULER = (
    # read
    *("requests", "kv_holding_waiting", "kv_cache_manager", "block_size", "max_model_len"),
    *("max_num_running_reqs", "num_spec_tokens", "num_sampled_tokens_per_step", "lora_config", "requires_kv_delivery"),
    *("vllm_config", "scheduler_config", "kv_cache_config"),
    # written for the length of one `schedule`, and put back
    *("running", "waiting", "policy", "max_num_scheduled_tokens", "max_num_active_reqs"),
    "adaptive_long_prefill_threshold",
    # called
    *("schedule", "update_from_output", "_preempt_request", "_request_blocks_can_be_freed"),
)

REQUEST = (
    *("request_id", "priority", "arrival_time", "sampling_params", "max_tokens", "status", "resumable", "num_tokens"),
    *("num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_output_placeholders", "spec_token_ids"),
    *("num_stale_output_tokens", "drop_stale_output", "lora_request"),
)
STEP = ("num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids")


class UnknownVllm(ImportError):
    """This vLLM is not one that the plugin knows."""


class Layout(NamedTuple):
    """The queues for one step. A step computes `num_tokens`, in this order; none if that is 0."""

    running: list[Any]
    newcomers: list[Any]  # waiting requests
    held: list[Any]  # running requests without a token in this step
    num_tokens: int
    most_tokens: int = 0  # of one request; 0: no bound


def check_version(version: str) -> None:
    """Raise UnknownVllm unless the plugin knows this version of vLLM."""
    if version.partition("+")[0] not in VERSIONS:
        raise UnknownVllm(
            f"alignedserve_vllm.AlignedScheduler works inside vLLM {', '.join(VERSIONS)}; this is vLLM {version}. "
            f"Install one of these versions, or start vLLM without --scheduler-cls."
        )


def load_base() -> Any:
    """Return vLLM's scheduler to extend. Raises UnknownVllm."""
    try:
        from vllm import __version__
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    except ImportError as error:
        raise UnknownVllm(f"alignedserve_vllm runs inside vLLM, which is not here: {error}") from error
    check_version(__version__)
    return AsyncScheduler


def load_logger_base() -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    return StatLoggerBase


def check_params_by(problem_of: Callable[[dict[str, Any]], tuple[str, str] | None]) -> None:
    """Refuse requests with 400 whose xargs have a problem, given as name and text. The first call counts."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    verify = SamplingParams.verify
    if hasattr(verify, "__wrapped__"):
        return

    @wraps(verify)
    def checked(params: Any, *args: Any, **kwargs: Any) -> Any:
        if params.extra_args and (problem := problem_of(params.extra_args)):
            raise VLLMValidationError(problem[1], parameter=f"vllm_xargs.{problem[0]}")
        return verify(params, *args, **kwargs)

    SamplingParams.verify = checked


def check_scheduler(scheduler: Any) -> None:
    """Raise UnknownVllm with the names that this scheduler lacks."""
    missing = [name for name in SCHEDULER if not hasattr(scheduler, name)]
    if missing:
        raise UnknownVllm(f"this vLLM's scheduler has no {', '.join(missing)}: alignedserve_vllm knows {VERSIONS}")


def options_of(scheduler: Any) -> dict[str, Any]:
    """Return what `--additional-config` names under "alignedserve"."""
    return dict((scheduler.vllm_config.additional_config or {}).get("alignedserve") or {})


def instance_of(config: Any, engine: int | None = None) -> str:
    """Return what names an engine among all on a machine, alike in each process of its vLLM; None: this one."""
    return f"{config.instance_id}-{config.parallel_config.data_parallel_index if engine is None else engine}"


def uses_scheduler(config: Any, name: str) -> bool:
    chosen = config.scheduler_config.scheduler_cls
    return name in (chosen if isinstance(chosen, str) else getattr(chosen, "__name__", ""))


def can_plan(scheduler: Any) -> bool:
    """Return whether requests generate tokens, in chunks: else vLLM's own order stays."""
    return scheduler.num_sampled_tokens_per_step == 1 and bool(scheduler.scheduler_config.enable_chunked_prefill)


def max_loras(scheduler: Any) -> int | None:
    return scheduler.lora_config.max_loras if scheduler.lora_config else None


def num_blocks(scheduler: Any) -> tuple[int, int]:
    """Return all blocks and the free ones, in blocks of one request's tokens."""
    pool, num_groups = scheduler.kv_cache_manager.block_pool, max(len(scheduler.kv_cache_config.kv_cache_groups), 1)
    return pool.num_gpu_blocks // num_groups, pool.get_num_free_blocks() // num_groups


def xargs_of(request: Any) -> dict[str, Any]:
    return (request.sampling_params.extra_args if request.sampling_params is not None else None) or {}


def is_running(request: Any) -> bool:
    return bool(request.status.name == "RUNNING")


def is_ready(request: Any) -> bool:
    """Return whether the request can be planned: it runs, or waits for nothing but its turn."""
    if request.resumable:
        return False
    if is_running(request):
        return True
    is_draining = request.num_stale_output_tokens > 0 and not request.drop_stale_output
    return request.status.name in ("WAITING", "PREEMPTED") and not is_draining and request.num_computed_tokens == 0


def num_generated(request: Any) -> int:
    """Return its tokens, with those of steps in flight; drafts in flight count as if accepted."""
    return int(request.num_output_tokens + request.num_output_placeholders)


def num_pending(request: Any) -> int:
    """Return the tokens that vLLM computes next of a running request; 0: its last one is in flight."""
    if request.num_output_placeholders and num_generated(request) >= request.max_tokens:
        return 0
    known = request.num_tokens + len(request.spec_token_ids) + request.num_output_placeholders
    return max(int(known - request.num_computed_tokens), 0)


def adapter_of(request: Any) -> int:
    """Return the number of its adapter; 0: none."""
    return int(request.lora_request.lora_int_id) if request.lora_request else 0


def preempt(scheduler: Any, request: Any, now: float) -> bool:
    """Preempt a running request as vLLM does; return whether its blocks are free now."""
    if not is_running(request) or not scheduler._request_blocks_can_be_freed(request):
        return False
    scheduler.running.remove(request)
    scheduler._preempt_request(request, now, drop_stale_output=scheduler.requires_kv_delivery)
    return True


@contextmanager
def laid_out(scheduler: Any, layout: Layout) -> Iterator[None]:
    """Lay the queues out for one `schedule` of vLLM's, and put them back after it.

    vLLM computes `running` in order, then `waiting`, until the tokens are spent, and preempts from the end of
    `running` when memory lacks.
    """
    config, waiting = scheduler.scheduler_config, scheduler.waiting
    names = ("policy", "max_num_scheduled_tokens", "max_num_active_reqs", "adaptive_long_prefill_threshold")
    before = {name: getattr(scheduler, name) for name in names}
    longest = config.long_prefill_token_threshold
    queue = _queue_of(scheduler, layout.newcomers)
    scheduler.running, scheduler.waiting = layout.running, queue
    scheduler.max_num_scheduled_tokens = min(layout.num_tokens, scheduler.max_num_scheduled_tokens)
    # A request that sits out still has a row in the model runner.
    scheduler.max_num_active_reqs -= len(layout.held)
    if layout.most_tokens:
        config.long_prefill_token_threshold = layout.most_tokens
        scheduler.adaptive_long_prefill_threshold = False
    try:
        yield
    finally:
        scheduler.running.extend(layout.held)
        scheduler.waiting, config.long_prefill_token_threshold = waiting, longest
        for name, value in before.items():
            setattr(scheduler, name, value)
        _put_back(waiting, queue, layout.newcomers)


def _queue_of(scheduler: Any, newcomers: list[Any]) -> Any:
    if not hasattr(scheduler, "_alignedserve_fcfs"):
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy

        scheduler._alignedserve_fcfs = (FCFSRequestQueue, SchedulingPolicy.FCFS)
    queue_class, scheduler.policy = scheduler._alignedserve_fcfs
    return queue_class(newcomers)


def _put_back(waiting: Any, queue: Any, newcomers: list[Any]) -> None:
    still = {request.request_id for request in queue}
    admitted = [request for request in newcomers if request.request_id not in still]
    if admitted:
        waiting.remove_requests(admitted)
    known = {request.request_id for request in newcomers}
    preempted = [request for request in queue if request.request_id not in known]
    if preempted:
        waiting.prepend_requests(preempted)
