"""Orders to form a batch for a decode worker whose link is not there yet.

A worker of another node links with a pool when the router first wants a batch of that pool for it. The order waits for
the link; otherwise the router would try other pools, and each try would make a link as well. It does not wait long: a
worker whose link is down would never get its batch.
"""

from alignedserve.core.ids import BatchId
from alignedserve.messages.pools import FormBatch

LINK_WAIT_S = 1.0  # many times what a link takes between two hosts


class WaitingForms:
    """The questions that wait, in the order in which they came."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._waiting: dict[BatchId, tuple[FormBatch, float]] = {}  # with the end of the wait

    def add(self, form: FormBatch, now: float) -> None:
        self._waiting[form.batch_id] = (form, now + self._wait_s)

    def linked(self, worker: str) -> list[FormBatch]:
        return self._take([form for form, _ in self._waiting.values() if form.worker == worker])

    def expired(self, now: float) -> list[FormBatch]:
        return self._take([form for form, ends_s in self._waiting.values() if ends_s <= now])

    def clear(self) -> None:
        self._waiting.clear()

    def _take(self, forms: list[FormBatch]) -> list[FormBatch]:
        for form in forms:
            del self._waiting[form.batch_id]
        return forms
