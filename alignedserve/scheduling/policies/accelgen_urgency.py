"""AccelGen's parameters and its measure of urgency (sections 4.2 and 4.3 of the paper)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import WorkerView
from alignedserve.scheduling.table import Bools, Floats

_STEP = 64  # forward sizes that are tried for the pivot are multiples of it
_LARGEST = 8192


@dataclass(frozen=True, slots=True)
class AccelgenConfig:
    """The paper's values; docs/policies/accelgen.md gives the reasons for values that the paper does not name."""

    gamma_s: float = 0.75  # remaining time within which requests count as equally urgent: section 6.1
    pivot_len: int | None = None  # S_pf; the paper measures 768 (OPT-13B) and 1 280 (OPT-175B). None: by the cost model
    saturation: float = 0.1  # then: the smallest forward size within this share of the best tokens per second
    long_prompt_len: int = 4096  # section 1
    default_tpot_s: float = 0.1875  # of real-time requests that have none: section 4.3
    default_ttft_s: float = 1.0
    default_deadline_s: float = 3600.0  # of best-effort requests without any SLO
    watermark: float = 0.01  # share of the blocks that a prompt leaves free (vLLM, on which it is built)
    reserve_prompts: bool = True  # a prompt begins where all of it fits, and keeps the blocks for its rest (vLLM)
    max_preemptions: int = 2  # of one request for more urgent ones
    starvation_s: float = 60.0  # a request that has missed its SLO preempts none before it has waited so long
    dynamic_chunking: bool = True  # False: /Chunk of section 6.3, chunks of static_chunk_len
    static_chunk_len: int = 512
    prioritisation: bool = True  # False: /Order, first come, first served
    multi_resource: bool = True  # False: /Batch, one after the other in the order of the queue


class Pivot(NamedTuple):
    """The forward size at which throughput saturates, and its duration."""

    num_tokens: int  # S_pf
    duration_s: float  # T_pf

    @property
    def rate(self) -> float:
        return self.num_tokens / self.duration_s


class Urgency(NamedTuple):
    """Urgency of each request, by row."""

    slo_s: Floats  # of its next iteration
    remaining_s: Floats  # T_r: the time that it can still wait
    may_preempt: Bools  # whether evicting others can still help it


def find_pivot(costs: CostModel, config: AccelgenConfig) -> Pivot:
    """Return the pivot (section 4.2), by the cost model where the paper measures it."""

    def duration_s(num_tokens: int) -> float:
        work = IterationWork()
        work.add_chunk(num_tokens, 0, is_last=True)
        return costs.iteration_s(work)

    if config.pivot_len is not None:
        return Pivot(config.pivot_len, duration_s(config.pivot_len))
    sizes = range(_STEP, _LARGEST + 1, _STEP)
    rates = [size / duration_s(size) for size in sizes]
    size = next(size for size, rate in zip(sizes, rates, strict=True) if rate >= (1 - config.saturation) * max(rates))
    return Pivot(size, duration_s(size))


def urgency_of(view: WorkerView, config: AccelgenConfig, *, chunk_len: float, longest_s: float) -> Urgency:
    """Return the urgency of all requests (section 4.3). `chunk_len`: L_c, the average chunk; `longest_s`: T_max.

    A token with an SLO: T_r = SLO - T_w - N_ck * T_max. A deadline is spread evenly over the iterations of a request,
    and what one waits more or less than its part is carried to the next: the k-th of N is due at arrival +
    deadline * k / N, so that nothing needs to be remembered of a request but its progress.
    """
    table = view.table
    num_chunks = np.ceil(table.num_remaining / chunk_len)
    is_first = table.num_generated == 0
    slo_s = np.where(is_first, table.ttft_s, table.tpot_s)
    defaults = np.where(is_first, config.default_ttft_s, config.default_tpot_s)
    is_online = table.is_real_time & np.isinf(table.deadline_s)
    slo_s = np.where(np.isinf(slo_s) & is_online, defaults, slo_s)
    online_s = slo_s - (view.now - table.waits_since_s) - num_chunks * longest_s

    has_no_slo = np.isinf(slo_s) & np.isinf(table.deadline_s)
    deadline_s = np.where(has_no_slo, config.default_deadline_s, table.deadline_s)
    # The last chunk gives a token, so there is one iteration less than chunks and tokens.
    num_iterations = np.ceil(table.prompt_len / chunk_len) + table.predicted_len - 1
    num_after = num_chunks - 1 + np.maximum(table.predicted_len - table.num_generated, 1) - 1
    is_offline = np.isfinite(deadline_s)
    spread_s = np.where(is_offline, deadline_s, 0.0) / num_iterations
    due_s = table.arrival_s + spread_s * np.maximum(num_iterations - num_after, 0)
    offline_s = np.where(is_offline, due_s - view.now - longest_s - _preemption_s(view), np.inf)
    waited_s = view.now - table.waits_since_s
    is_missed = (waited_s >= slo_s) | (view.now - table.arrival_s >= deadline_s)
    return Urgency(
        np.minimum(slo_s, np.where(is_offline, spread_s, np.inf)),
        np.minimum(online_s, offline_s),
        ~is_missed | (waited_s >= config.starvation_s),
    )


def _preemption_s(view: WorkerView) -> float:
    table = view.table
    num_preemptions, num_tokens = int(table.num_preemptions.sum()), int(table.num_generated.sum())
    is_out = (table.num_preemptions > 0) & (table.num_blocks == 0)
    if not num_tokens or not is_out.any():
        return 0.0
    return float((view.now - table.waits_since_s[is_out]).max()) * min(num_preemptions / num_tokens, 1.0)
