"""Records of the adapters in a worker's memory: which requests wait for each, are about to use it, and use it."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from alignedserve.core.ids import RequestId
from alignedserve.core.request import LoraAdapter
from kernels.adapters.lora import AdapterMatrices


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """A request that waits for its adapter, or for its turn to use it."""

    request_id: RequestId
    adapter: LoraAdapter
    is_real_time: bool
    attempt: int | None  # None: it has begun elsewhere, and is not withdrawn
    since_s: float
    done: "Future[None]" = field(default_factory=Future)

    def is_of(self, request_id: RequestId, attempt: int | None) -> bool:
        is_until = attempt is None or (self.attempt is not None and self.attempt <= attempt)
        return self.request_id == request_id and self.attempt is not None and is_until


@dataclass(slots=True)
class Use:
    """How requests of one class hold an adapter."""

    num_users: int = 0  # sequences in the engine
    wishes: dict[RequestId, tuple[Wish, float]] = field(default_factory=dict)  # before they enter it; until when

    def is_wanted(self, now: float) -> bool:
        for request_id in [request_id for request_id, (_, until_s) in self.wishes.items() if until_s <= now]:
            del self.wishes[request_id]
        return bool(self.wishes)

    def holds(self, now: float) -> bool:
        return self.is_wanted(now) or self.num_users > 0


@dataclass(slots=True)
class Loaded:
    """An adapter in memory."""

    matrices: AdapterMatrices
    best_effort: Use = field(default_factory=Use)
    real_time: Use = field(default_factory=Use)
    is_real_time: bool = False  # the latest that held it

    @property
    def is_used(self) -> bool:
        return self.best_effort.num_users > 0 or self.real_time.num_users > 0

    def use(self, *, is_real_time: bool) -> Use:
        return self.real_time if is_real_time else self.best_effort

    def withdraw(self, request_id: RequestId, attempt: int | None) -> None:
        for use in (self.best_effort, self.real_time):
            if request_id in use.wishes and use.wishes[request_id][0].is_of(request_id, attempt):
                del use.wishes[request_id]

    def is_held(self, now: float) -> bool:
        return self.best_effort.holds(now) or self.real_time.holds(now)


@dataclass(frozen=True, slots=True)
class Loading:
    """An adapter on its way into memory."""

    work: "Future[None]"
    wishes: list[Wish] = field(default_factory=list)
    done: "Future[None]" = field(default_factory=Future)

    def is_for(self, *, is_real_time: bool) -> bool:
        return any(wish.is_real_time is is_real_time for wish in self.wishes)
