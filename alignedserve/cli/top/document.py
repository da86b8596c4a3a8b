"""The document of GET /v1/alignedserve/live as `top` reads it, and rates from two of them.

Fields that are not read here are passed over, so that a newer server is read as well.
"""

from collections.abc import Callable

import msgspec


class Tier(msgspec.Struct, frozen=True):
    """Requests of one class."""

    num_queued: int
    num_prefilling: int
    num_pooled: int
    num_decoding: int
    oldest_queued_s: float


class BatchLengths(msgspec.Struct, frozen=True):
    """The context lengths of the requests of one iteration."""

    num_requests: int
    shortest: int
    mean_len: float
    longest: int


class Worker(msgspec.Struct, frozen=True):
    """One worker."""

    worker: str
    node: str
    can_prefill: bool
    can_decode: bool
    is_elastic: bool
    is_draining: bool
    lean: float
    num_waiting: int
    num_running: int
    num_places: int
    num_blocks: int
    num_blocks_used: int
    num_prompt_tokens: int
    num_tokens: int
    wall_s: float
    compute_s: float
    batch: BatchLengths


class Pool(msgspec.Struct, frozen=True):
    """All KV pools together."""

    num_blocks: int
    num_blocks_used: int
    num_blocks_kept: int


class Prefixes(msgspec.Struct, frozen=True):
    """The prefix caches of all workers together."""

    num_query_tokens: int
    num_hit_tokens: int
    num_blocks: int


class Totals(msgspec.Struct, frozen=True):
    """Counters of the whole deployment."""

    num_prompt_tokens: int
    num_tokens: int


class Load(msgspec.Struct, frozen=True):
    """What the router of a deployment reported last."""

    tiers: dict[str, Tier]
    num_at_risk: int
    queue_wait_s: float
    pool: Pool
    workers: list[Worker]
    prefixes: Prefixes
    totals: Totals
    time: dict[str, float]  # seconds and counts of the iteration logs


class Objective(msgspec.Struct, frozen=True):
    """How often objectives of one kind were held."""

    tier: str
    objective: str
    held: int
    missed: int


class Model(msgspec.Struct, frozen=True):
    """One model."""

    name: str
    problem: str | None
    load: Load | None
    objectives: list[Objective] = []


class Batches(msgspec.Struct, frozen=True):
    """Batches of all clients."""

    num_waiting: int
    num_in_flight: int
    completed: int
    failed: int
    num_at_risk: int
    is_paused: bool
    num_batches: dict[str, int]


class LiveDocument(msgspec.Struct, frozen=True):
    """The whole document."""

    time_s: float
    not_ready: str | None
    models: list[Model]
    batches: Batches | None


class Reading:
    """The latest document and an earlier one, by which rates are told; None: there is none yet."""

    def __init__(self, latest: LiveDocument, earlier: LiveDocument | None) -> None:
        self.latest = latest
        self._earlier = earlier

    def gained(self, model: str, counter: Callable[[Load], float | None]) -> float | None:
        """Return by how much a counter of a model has grown; None: it cannot be told, or its process restarted."""
        now = _read(self.latest, model, counter)
        before = _read(self._earlier, model, counter) if self._earlier is not None else None
        return None if now is None or before is None or now < before else now - before

    def rate(self, model: str, counter: Callable[[Load], float | None]) -> float | None:
        gained = self.gained(model, counter)
        if gained is None or self._earlier is None or self.latest.time_s <= self._earlier.time_s:
            return None
        return gained / (self.latest.time_s - self._earlier.time_s)


def of_worker(name: str, counter: Callable[[Worker], float]) -> Callable[[Load], float | None]:
    return lambda load: next((counter(worker) for worker in load.workers if worker.worker == name), None)


def _read(document: LiveDocument, model: str, counter: Callable[[Load], float | None]) -> float | None:
    load = next((one.load for one in document.models if one.name == model), None)
    return counter(load) if load is not None else None
