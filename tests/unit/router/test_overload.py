"""The router refuses chats while those that it has accepted wait too long already."""

from typing import Any

import pytest

from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import Slo
from router.admission import WaitingChats
from router.state import TrackedRequest
from tests.support.marks import each
from tests.support.samples import GATEWAY, PREFILL, request

LONGEST_S = 40.0
LOOSE = Slo(ttft_s=1000.0)


class _Chats:
    """Chats of 100 tokens that wait, of which one a second is computed. Their first tokens are on time all the same."""

    def __init__(self, longest_s: float | None = LONGEST_S) -> None:
        self.waiting = WaitingChats(longest_s)
        self.tracked: list[TrackedRequest] = []
        self._num_computed = 0

    def come(self, count: int, arrival_s: float = 0.0, **changes: Any) -> None:
        for _ in range(count):
            name = f"r{len(self.tracked)}"
            one = request(name, prompt_len=100, arrival_s=arrival_s, **{"slo": LOOSE, **changes})
            self.tracked.append(TrackedRequest(one, GATEWAY, 1.0))

    def go_on(self, begin_s: int, end_s: int) -> None:
        for now in range(begin_s, end_s):
            self.waiting.note(self.tracked, self._num_computed, float(now))
            first = next(one for one in self.tracked if one.prefilled_s is None)
            if first.stage is Stage.QUEUED:
                first.move(Stage.PREFILLING, PREFILL)
            first.prefilled_s = now + 1.0
            self._num_computed += 100
        self.waiting.note(self.tracked, self._num_computed, float(end_s))

    def retry_after_s(self, now: float, **changes: Any) -> float | None:
        newcomer = request("new", prompt_len=100, arrival_s=now, **{"slo": LOOSE, **changes})
        return self.waiting.refused_for_s(newcomer, now)


@each(("num_chats", "retry_after_s"), [(39, None), (41, 35.0)])
def test_a_newcomer_is_refused_where_one_that_has_come_would_wait_longer_than_it_may(
    num_chats: int, retry_after_s: float | None
) -> None:
    """After six seconds 33 of 39 are left, or 35 of 41, each of a second; and the newcomer."""
    chats = _Chats()
    chats.come(num_chats)
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0) == retry_after_s


def test_while_late_ones_wait_a_newcomer_is_refused_only_if_it_would_be_late_too() -> None:
    """Late ones have a tenth of the time: the six that are left after six seconds would wait for 60 s more."""
    chats = _Chats()
    chats.come(12, slo=Slo(ttft_s=2.0))
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0, slo=Slo(ttft_s=0.9)) == pytest.approx(6.0)
    assert chats.retry_after_s(6.0, slo=Slo()) == pytest.approx(6.0)  # without any, it goes after all that have some
    assert chats.retry_after_s(6.0, slo=Slo(ttft_s=1.1)) is None
    chats.go_on(6, 9)
    assert chats.retry_after_s(9.0, slo=Slo(ttft_s=0.9)) is None  # three are left, of 30 s


def test_a_burst_that_has_just_come_is_accepted() -> None:
    chats = _Chats()
    chats.come(500)
    chats.go_on(0, 4)
    assert chats.retry_after_s(4.0) is None
    chats.go_on(4, 5)
    assert chats.retry_after_s(5.0) == 120.0  # the longest that clients are told


def test_what_has_been_accepted_since_the_last_look_counts() -> None:
    chats = _Chats()
    chats.come(30)
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0) is None
    for number in range(12):
        one = request(f"more{number}", prompt_len=100, arrival_s=6.0, slo=LOOSE)
        chats.waiting.accepted(TrackedRequest(one, GATEWAY, 1.0), 6.0)
    assert chats.retry_after_s(6.0) is not None


def test_a_tenant_that_floods_has_only_its_own_chats_refused() -> None:
    chats = _Chats()
    chats.come(100, tenant="flood")
    chats.come(2, tenant="other")
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0, tenant="flood") is not None
    assert chats.retry_after_s(6.0, tenant="other") is None
    assert chats.retry_after_s(6.0, tenant="newcomer") is None


def test_a_prompt_under_way_slows_nothing_down() -> None:
    """One has taken three seconds, and the next is under way for three: 20 take 60 s, not 120."""
    chats = _Chats()
    chats.come(20)
    for now in range(7):
        chats.waiting.note(chats.tracked, 100 * (now >= 3), float(now))
    assert chats.retry_after_s(6.0) == pytest.approx(60.0)


def test_answers_that_have_begun_do_not_wait_for_a_first_token() -> None:
    chats = _Chats()
    chats.come(1)
    chats.come(100)
    for one in chats.tracked[1:]:
        one.num_emitted = 3
    chats.go_on(0, 1)
    chats.waiting.note(chats.tracked, 100, 20.0)
    assert chats.retry_after_s(20.0) is None


def test_without_a_longest_wait_nobody_is_refused() -> None:
    chats = _Chats(None)
    chats.come(1000)
    chats.go_on(0, 100)
    assert chats.retry_after_s(100.0) is None
