"""Skip-join multi-level feedback queues (FastServe: Wu et al., 2023), as ALISE's and AccelGen's authors describe it."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.policies.alise import Preemption, PriorityPacking
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import RefreshedEstimate, RequestRuntimeModel, fit_request_runtime
from alignedserve.scheduling.table import Floats, Ints


@dataclass(frozen=True, slots=True)
class FastServeConfig:
    """Five queues as in AccelGen's comparison; docs/policies/fastserve.md has the sources of the other values."""

    num_queues: Annotated[int, Meta(ge=1)] = 5
    first_quantum_s: Annotated[float, Meta(gt=0)] | None = None  # doubled queue by queue; None: one short decode
    starvation_s: Annotated[float, Meta(gt=0)] = 10.0  # waiting that pays for one more way through all queues
    preemption: Preemption = Preemption.SWAP
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks kept free for newcomers
    runtime: RequestRuntimeModel | None = None  # None: probed from the worker's cost model


class FastServe:
    """The policy: a request joins the first queue whose quantum covers its prefill, and sinks with each quantum used.

    The page docs/policies/fastserve.md has the formulas and an example.
    """

    def __init__(self, config: FastServeConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime, config.runtime)

    def plan(self, view: WorkerView) -> IterationPlan:
        config, table = self._config, view.table
        runtime = self._runtime.of(view.costs)
        quantum_s = runtime.decode_s if config.first_quantum_s is None else config.first_quantum_s
        waited_s = np.maximum(view.now - table.arrival_s - table.service_s, 0.0)
        prefill_s = runtime.prefill_s(table.prompt_len.astype(np.float64))
        queue = queue_of(
            prefill_s / quantum_s,
            table.service_s / quantum_s,
            waited_s // config.starvation_s,
            num_queues=config.num_queues,
        )
        wait_s = self._estimated_wait_s(queue, quantum_s, waited_s)
        return PriorityPacking(view, queue, wait_s, preemption=config.preemption, watermark=config.watermark).plan()

    def _estimated_wait_s(self, queue: Ints, quantum_s: float, waited_s: Floats) -> Floats:
        per_queue = np.bincount(queue, minlength=self._config.num_queues) * np.exp2(np.arange(self._config.num_queues))
        better_s = (np.cumsum(per_queue) - per_queue) * quantum_s
        starvation_s = self._config.starvation_s
        promoted_s = np.where(queue > 0, starvation_s - waited_s % starvation_s, 0.0)
        wait_s: Floats = np.minimum(better_s[queue], promoted_s)
        return wait_s


def queue_of(prefill: Floats, service: Floats, num_promotions: Floats, *, num_queues: int) -> Ints:
    """Return the queue of every request, 0 the first; times in quanta of that one.

    A request that joined queue j has used up the queues to i after 2^j + .. + 2^i = 2^(i+1) - 2^j. A promotion starts
    again in the first queue and pays for one way down to the last.
    """
    last = num_queues - 1
    joined = np.where(num_promotions > 0, 1.0, np.exp2(np.ceil(np.log2(np.maximum(prefill, 1.0)))))
    used = np.maximum(service - num_promotions * (2.0**last - 1.0), 0.0)
    queue: Ints = np.clip(np.frexp(used + joined)[1].astype(np.int64) - 1, 0, last)
    return queue
