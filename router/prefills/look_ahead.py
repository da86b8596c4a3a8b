"""How much work of a class waits at a worker where several tenants share the class: enough that it never runs dry.

All that waits beyond that stays in the router's queue, whose order is fair; workers and pools order what they have by
deadlines, turns and memory, and know no tenants. With one tenant there is no such bound.

A worker has prompts of the class for 0.1 s of its time, and one in any case. One that does both phases has as many
requests as it decodes in one iteration, and a sixteenth more, so that the next one is there when one ends. A prefill
worker's requests wait in the pool of its node: there, and on their way to it, a quarter as many of the class may be as
the decode workers of the node decode in one iteration.
Example: a worker computes 5 000 prompt tokens/s and decodes 32 requests together. It has at most 500 tokens of prompts,
and 34 requests; of best effort, those of real time count among the 34.

A request on time whose tenant holds less than its share of all that workers have does not wait for room
(PrefillQueue.is_bounded).
"""

from collections.abc import Collection

from router.pool_records import PoolRecord
from router.state import WorkerRecord

_PROMPTS_S = 0.1
_FALLBACK_TOKENS = 512.0  # where a worker does not tell its speed
_MEASURED_TOKENS = 64  # of the prompt whose time a separate prefill worker tells
_MORE_PLACES = 1 / 16
_POOLED_SHARE = 1 / 4
_LEAST_POOLED = 4


def wants_more(
    worker: WorkerRecord, pool: PoolRecord | None, beside: Collection[WorkerRecord], *, is_real_time: bool
) -> bool:
    """Return whether a worker has less of a class than it may have to wait for. `beside`: workers of its node."""
    num_real_time_tokens = (
        worker.num_real_time_tokens if is_real_time else worker.num_prefill_tokens - worker.num_real_time_tokens
    )
    if num_real_time_tokens >= _allowed_tokens(worker) and num_real_time_tokens:
        return False
    if worker.registered.can_decode:
        return _has_places(worker, is_real_time=is_real_time)
    places = on_the_way = 0
    for one in beside:
        places += one.num_places
        on_the_way += one.num_prompts(is_real_time=is_real_time)
    pooled = 0
    if pool is not None:
        pooled = len(pool.pooled_real_time) if is_real_time else pool.num_pooled - len(pool.pooled_real_time)
    return on_the_way + pooled < max(_POOLED_SHARE * places, _LEAST_POOLED)


def is_decoded_soon(num_tokens: int, pool: PoolRecord | None, beside: Collection[WorkerRecord]) -> bool:
    """Return whether a prompt of so many tokens, computed now, would find room to decode.

    Where slack is packed (BatchingConfig.pack_share), a request with a TPOT objective waits for that before its first
    token, as after it every second counts as a gap: until a decode worker of the node has room for it, beside all that
    its room is promised to, while fewer wait with their first token than there are workers. What best effort waits for
    does not count: it goes after these. Where a worker keeps lengths apart, the pool needs many to choose from.
    `beside`: the workers of the node.
    """
    rooms: list[int] = []
    waiting = len(pool.pooled_real_time) if pool is not None else 0
    for worker in beside:
        if worker.num_places and not worker.is_draining:
            if not worker.takes_any_length:
                return True
            rooms.append(worker.room)
            waiting += worker.load.num_real_time_candidates if worker.load is not None else 0
    if not rooms:
        return True
    return waiting < len(rooms) and num_tokens <= max(rooms)


def _allowed_tokens(worker: WorkerRecord) -> float:
    speed, short_prompt_s = worker.prompt_tokens_per_s, worker.registered.speed.short_prompt_s
    if speed > 1:
        return _PROMPTS_S * speed
    return _PROMPTS_S * _MEASURED_TOKENS / short_prompt_s if short_prompt_s else _FALLBACK_TOKENS


def _has_places(worker: WorkerRecord, *, is_real_time: bool) -> bool:
    if is_real_time:
        num_held = worker.num_real_time_prompts + len(worker.decoding_real_time)
    else:
        num_held = len(worker.prefilling) + len(worker.decoding)
    places = worker.num_places
    return num_held < places + max(1, int(_MORE_PLACES * places))
