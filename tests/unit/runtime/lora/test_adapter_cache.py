"""The adapters of a worker's memory: who has them loaded, who waits for whom, and what leaves."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch

from alignedserve.config.sections import LoraConfig
from alignedserve.core.errors import AdapterError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import LoraAdapter
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.workers import PrefillRequest
from alignedserve.runtime.device_check.self_check import MODEL
from alignedserve.runtime.lora.adapter_cache import AdapterCache, SequenceAdapters
from kernels.addend_layout import ProductShape
from kernels.lora import AdapterMatrices
from tests.support.samples import request

BYTES = 64  # of each adapter


def adapter(number: int) -> LoraAdapter:
    return LoraAdapter(str(number), "/nowhere", bytes([number]) * 16)


def request_id(number: int) -> RequestId:
    return RequestId(f"of {number}")


class Cache:
    """A cache, the time of its clock, and what it loaded."""

    def __init__(self, max_adapters: int, max_bytes: int = 1 << 20) -> None:
        self.now = 0.0
        self.loads: list[int] = []
        self.before_load: Callable[[int], None] = lambda _: None
        self.of = AdapterCache(self._load, max_adapters=max_adapters, max_bytes=max_bytes, clock=lambda: self.now)

    def _load(self, asked: LoraAdapter) -> AdapterMatrices:
        self.before_load(int(asked.name))
        self.loads.append(int(asked.name))
        matrices = AdapterMatrices([ProductShape(4, 4)], 1, torch.float32, torch.device("cpu"))
        matrices.num_bytes = BYTES
        return matrices

    def chat(self, number: int) -> "Future[None] | None":
        return self.of.prepare(adapter(number), request_id(number), is_real_time=True)

    def document(self, number: int) -> "Future[None] | None":
        return self.of.prepare(adapter(number), request_id(number), is_real_time=False)

    def begin(self, number: int, *, is_real_time: bool) -> None:
        """Let a request enter the engine, which has waited for its adapter."""
        waiting = self.of.prepare(adapter(number), request_id(number), is_real_time=is_real_time)
        if waiting is not None:
            waiting.result(10)
        self.of.acquire(adapter(number), request_id(number), is_real_time=is_real_time)

    def end(self, number: int, *, is_real_time: bool) -> None:
        self.of.release(adapter(number), is_real_time=is_real_time)

    def serve(self, number: int, *, is_real_time: bool = True) -> None:
        self.begin(number, is_real_time=is_real_time)
        self.end(number, is_real_time=is_real_time)


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache(4)
    yield made
    made.of.close()


@pytest.fixture
def small() -> Iterator[Cache]:
    made = Cache(1)
    yield made
    made.of.close()


def is_held_back(waiting: "Future[None] | None") -> bool:
    return waiting is not None and not waiting.done()


# --- what is loaded


def test_the_least_recently_used_adapter_leaves_but_none_that_is_used(cache: Cache) -> None:
    for number in (1, 2, 3, 4, 1, 5):
        cache.serve(number)
    assert cache.loads == [1, 2, 3, 4, 5]
    cache.serve(1)
    assert cache.loads == [1, 2, 3, 4, 5]  # 2 had left
    for number in (1, 3, 4, 5):
        cache.begin(number, is_real_time=True)
    waiting = cache.chat(6)
    assert is_held_back(waiting)
    assert cache.chat(3) is None
    cache.end(1, is_real_time=True)
    assert waiting is not None
    waiting.result(10)
    assert cache.loads[-1] == 6
    assert cache.of.num_bytes == 4 * BYTES


def test_a_sequence_gets_an_adapter_that_has_left_and_a_failure_is_told(small: Cache) -> None:
    for number in (1, 2):
        small.of.acquire(adapter(number), request_id(number), is_real_time=True)
    assert small.of.num_bytes == 2 * BYTES
    small.end(1, is_real_time=True)
    assert small.of.num_bytes == BYTES
    small.end(2, is_real_time=True)

    def fail(_: int) -> None:
        raise AdapterError("it is gone")

    small.before_load = fail
    waiting = small.chat(3)
    assert waiting is not None
    waiting.result(10)
    with pytest.raises(AdapterError, match="it is gone"):
        small.of.acquire(adapter(3), request_id(3), is_real_time=True)


def test_nobody_waits_while_an_adapter_is_loaded_but_its_own_requests(cache: Cache) -> None:
    may_go_on = threading.Event()
    cache.before_load = lambda number: None if number == 1 else (None, may_go_on.wait(20))[0]
    cache.serve(1)
    slow, same = cache.document(2), cache.chat(2)
    assert cache.chat(1) is None
    assert is_held_back(slow)
    may_go_on.set()
    for waiting in (slow, same):
        assert waiting is not None
        waiting.result(10)
    assert cache.loads == [1, 2]


def test_a_request_from_another_worker_waits_for_its_adapter_but_not_for_room(small: Cache) -> None:
    small.of.acquire(adapter(1), request_id(1), is_real_time=True)
    waiting = small.of.prepare_at_once(adapter(2), request_id(2), is_real_time=True)
    assert waiting is not None
    waiting.result(10)
    assert small.of.prepare_at_once(adapter(2), request_id(2), is_real_time=True) is None
    small.of.acquire(adapter(2), request_id(2), is_real_time=True)
    assert small.of.num_bytes == 2 * BYTES


def test_adapters_that_fill_the_memory_exactly_leave_for_others() -> None:
    cache = Cache(16, 3 * BYTES)
    for number in (1, 2, 3, 4, 1):
        cache.serve(number)
    assert cache.loads == [1, 2, 3, 4, 1]
    assert cache.of.num_bytes == 3 * BYTES
    cache.of.close()


# --- classes


def test_documents_of_many_adapters_leave_a_place_for_chats(cache: Cache) -> None:
    for number in (1, 2, 3):
        cache.begin(number, is_real_time=False)
    document = cache.document(4)
    cache.now += 60.0
    for number in (5, 6, 5):
        cache.serve(number)
    assert is_held_back(document)
    assert cache.chat(1) is None  # what documents use is there for chats, too, however long others wait


def test_what_is_being_loaded_counts_among_the_bytes() -> None:
    cache = Cache(16, 4 * BYTES)
    documents = [cache.document(number) for number in range(1, 9)]
    for waiting in documents[:3]:
        assert waiting is not None
        waiting.result(10)
    assert all(map(is_held_back, documents[3:]))
    cache.serve(9)  # a quarter is left for chats
    assert cache.loads == [1, 2, 3, 9]
    assert cache.of.num_bytes <= 4 * BYTES
    cache.of.close()


def test_an_adapter_that_chats_left_behind_counts_once_a_document_takes_it(cache: Cache) -> None:
    for number in (1, 2, 3, 4):
        cache.serve(number)
    for number in (1, 2, 3):
        assert cache.document(number) is None
    assert is_held_back(cache.document(4))
    assert cache.document(3) is None


def test_a_chat_takes_the_place_of_a_document_that_has_not_begun(cache: Cache) -> None:
    for number in (1, 2):
        cache.begin(number, is_real_time=True)
    for number in (3, 4):
        cache.begin(number, is_real_time=False)
        cache.end(number, is_real_time=False)
        assert cache.document(number) is None
    cache.serve(5)
    assert cache.loads == [1, 2, 3, 4, 5]
    cache.of.acquire(adapter(4), request_id(4), is_real_time=False)
    assert cache.loads == [1, 2, 3, 4, 5]  # the other one left


def test_what_chats_wait_for_is_loaded_before_what_documents_wait_for() -> None:
    cache = Cache(16)
    cache.serve(1)
    may_go_on = threading.Event()
    cache.before_load = lambda _: (None, may_go_on.wait(20))[0]
    documents = [cache.document(number) for number in (2, 3, 4, 5)]
    chats = cache.chat(6), cache.chat(4)
    may_go_on.set()
    for waiting in (*documents, *chats):
        assert waiting is not None
        waiting.result(10)
    assert sorted(cache.loads) == [1, 2, 3, 4, 5, 6]
    assert max(cache.loads.index(6), cache.loads.index(4)) <= 3  # behind what had begun
    cache.of.close()


def test_chats_that_wait_go_before_documents(small: Cache) -> None:
    small.begin(1, is_real_time=True)
    document, chat = small.document(2), small.chat(3)
    small.end(1, is_real_time=True)
    assert chat is not None
    chat.result(10)
    assert (small.loads, is_held_back(document)) == ([1, 3], True)


def test_of_several_places_chats_leave_one_to_documents_that_have_none(cache: Cache) -> None:
    for number in (1, 2, 3, 4):
        cache.begin(number, is_real_time=True)
    chats, document = [cache.chat(number) for number in (5, 6)], cache.document(7)
    cache.end(1, is_real_time=True)
    assert document is not None
    document.result(10)
    assert all(map(is_held_back, chats))
    cache.of.acquire(adapter(7), request_id(7), is_real_time=False)
    assert is_held_back(cache.document(7))  # further ones wait behind the chats
    cache.end(2, is_real_time=True)
    assert chats[0] is not None
    chats[0].result(10)


@pytest.mark.parametrize("max_adapters", [1, 4])
def test_documents_have_an_adapter_at_last_though_chats_never_cease_to_use_all(max_adapters: int) -> None:
    cache = Cache(max_adapters)
    for number in range(max_adapters):
        cache.begin(number, is_real_time=True)
    document = cache.document(9)
    assert document is not None
    for turn in range(120):
        cache.now += 0.25
        number = turn % max_adapters
        chat = cache.chat(number)
        cache.end(number, is_real_time=True)
        if chat is not None:
            break
        cache.of.acquire(adapter(number), request_id(number), is_real_time=True)
    document.result(10)
    assert 20.0 < cache.now < 21.0
    assert is_held_back(chat)
    cache.of.acquire(adapter(9), request_id(9), is_real_time=False)
    cache.end(9, is_real_time=False)
    assert chat is not None
    chat.result(10)
    cache.of.close()


def test_while_chats_give_up_an_adapter_those_with_others_go_on(cache: Cache) -> None:
    for number in (1, 2, 3, 4):
        cache.begin(number, is_real_time=True)
    cache.document(9)
    cache.now += 21.0
    waiting = cache.chat(1)
    cache.now += 5.0
    assert is_held_back(waiting)
    assert cache.chat(2) is None


def test_an_adapter_is_loaded_once_for_all_that_wait_for_it(small: Cache) -> None:
    small.begin(1, is_real_time=False)
    waiting = [small.document(number) for number in (2, 3, 2)]
    small.end(1, is_real_time=False)
    for one in (waiting[0], waiting[2]):
        assert one is not None
        one.result(10)
    assert is_held_back(waiting[1])


def test_an_adapter_stays_for_a_request_that_has_not_begun_but_not_for_ever(cache: Cache) -> None:
    for number in (1, 2, 3):
        waiting = cache.document(number)
        assert waiting is not None
        waiting.result(10)
    last = cache.document(4)
    assert is_held_back(last)  # else it would take what another needs in its next iteration
    cache.of.acquire(adapter(2), request_id(2), is_real_time=False)
    assert cache.loads == [1, 2, 3]
    cache.now += 31.0  # 1 and 3 were aborted meanwhile
    assert last is not None
    last.result(10)
    assert cache.loads == [1, 2, 3, 4]


def test_an_adapter_stays_for_each_request_that_has_not_begun(small: Cache) -> None:
    small.begin(1, is_real_time=True)
    assert small.of.prepare(adapter(1), RequestId("another"), is_real_time=True) is None
    small.end(1, is_real_time=True)
    other = small.chat(2)
    assert is_held_back(other)
    small.of.acquire(adapter(1), RequestId("another"), is_real_time=True)
    assert small.loads == [1]  # else an iteration would wait for it
    small.end(1, is_real_time=True)
    assert other is not None
    other.result(10)


def test_an_adapter_is_neither_loaded_nor_kept_for_a_request_that_was_aborted(small: Cache) -> None:
    small.begin(1, is_real_time=True)
    document, chat, last = small.document(2), small.chat(3), small.document(4)
    small.of.withdraw(request_id(2), 0)
    small.of.withdraw(request_id(3), None)
    assert document is not None
    assert chat is not None
    assert (document.cancelled(), chat.cancelled()) == (True, True)
    small.end(1, is_real_time=True)
    assert last is not None
    last.result(10)
    assert small.loads == [1, 4]
    other = small.document(5)
    small.of.withdraw(request_id(4), 0)  # it has not begun, though its adapter is there
    assert other is not None
    other.result(10)
    assert small.loads == [1, 4, 5]


@pytest.mark.parametrize("is_real_time", [True, False])
def test_a_worker_that_computes_nothing_waits_for_no_adapter_of_sequences_that_have_ended(
    cache: Cache, *, is_real_time: bool
) -> None:
    """They leave the engine with the next iteration, which is that of a request that waits."""
    numbers = (1, 2, 3, 4) if is_real_time else (1, 2, 3)
    for number in numbers:
        cache.begin(number, is_real_time=is_real_time)
    first, second = (cache.of.prepare(adapter(one), request_id(one), is_real_time=is_real_time) for one in (5, 6))
    assert is_held_back(first)
    cache.of.rest(has_ended=True)
    assert first is not None
    first.result(10)
    assert is_held_back(second)  # until the first has begun
    cache.of.rest(has_ended=False)
    cache.of.acquire(adapter(5), request_id(5), is_real_time=is_real_time)
    for number in numbers:
        cache.end(number, is_real_time=is_real_time)
    assert second is not None
    second.result(10)
    assert cache.of.num_bytes <= 4 * BYTES


def test_a_message_that_aborts_withdraws_what_its_request_waits_for(small: Cache) -> None:
    adapters = SequenceAdapters(LoraConfig(), MODEL, torch.float32, torch.device("cpu"))
    adapters.close()
    adapters.cache = small.of
    small.begin(1, is_real_time=False)
    waiting = request("r2", adapter=adapter(2))
    (prepared,) = adapters.prepare(PrefillRequest(waiting, 4))
    assert adapters.prepare(AbortRequest(waiting.request_id, 3)) == ()
    assert not prepared.done()
    assert adapters.prepare(AbortRequest(waiting.request_id, 4)) == ()
    assert prepared.cancelled()


def test_an_abort_is_for_attempts_until_its_own_and_for_none_that_began_elsewhere(small: Cache) -> None:
    small.begin(1, is_real_time=True)
    again = small.of.prepare(adapter(2), request_id(2), is_real_time=True, attempt=3)
    small.of.withdraw(request_id(2), 2)
    assert is_held_back(again)
    moved = small.of.prepare_at_once(adapter(3), request_id(3), is_real_time=True)
    small.of.withdraw(request_id(3), None)
    assert moved is not None
    moved.result(10)
