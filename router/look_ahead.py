"""How much work of a class waits at a worker where several tenants share the class: enough that it never runs dry.

All that waits beyond that stays in the router's queue, whose order is fair; workers and pools order what they have by
deadlines, lengths and memory, and know no tenants. With one tenant there is no such bound.

A worker that does both phases has prompts of the class for 0.1 s of its time, and one in any case; and as many requests
as it decodes in one iteration, and a sixteenth more, so that the next one is there when one ends. A prefill worker's
requests wait in the pool of its node: there, and on their way to it, a quarter as many of the class may be as the
decode workers of the node decode in one iteration, of which batches of one length can still be formed.
Example: a worker computes 5 000 prompt tokens/s and decodes 32 requests together. It has at most 500 tokens of prompts,
and 34 requests; of best effort, those of real time count among the 34.

A request on time whose tenant has far less than its share at workers does not wait for room (PrefillQueue.is_bounded).
"""

from collections.abc import Collection

from router.state import PoolRecord, WorkerRecord

_PROMPTS_S = 0.1
_FALLBACK_TOKENS = 512  # where a worker does not tell its speed
_MORE_PLACES = 1 / 16
_POOLED_SHARE = 1 / 4
_LEAST_POOLED = 4


def wants_more(
    worker: WorkerRecord, pool: PoolRecord | None, beside: Collection[WorkerRecord], *, is_real_time: bool
) -> bool:
    """Return whether a worker has less of a class than it may have to wait for. `beside`: workers of its node."""
    if worker.registered.can_decode:
        return _colocated_wants_more(worker, is_real_time=is_real_time)
    places = on_the_way = 0
    for one in beside:
        places += one.num_places
        on_the_way += one.num_prompts(is_real_time=is_real_time)
    pooled = 0
    if pool is not None:
        pooled = len(pool.pooled_real_time) if is_real_time else pool.num_pooled - len(pool.pooled_real_time)
    return on_the_way + pooled < max(_POOLED_SHARE * places, _LEAST_POOLED)


def _colocated_wants_more(worker: WorkerRecord, *, is_real_time: bool) -> bool:
    if is_real_time:
        given = worker.num_real_time_tokens
        num_held = worker.num_real_time_prompts + len(worker.decoding_real_time)
    else:
        given = worker.num_prefill_tokens - worker.num_real_time_tokens
        num_held = len(worker.prefilling) + len(worker.decoding)
    speed = worker.prompt_tokens_per_s
    allowed = _PROMPTS_S * speed if speed > 1 else _FALLBACK_TOKENS
    places = worker.num_places
    return (not given or given < allowed) and num_held < places + max(1, int(_MORE_PLACES * places))
