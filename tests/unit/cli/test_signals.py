"""A Ctrl-C or SIGTERM during the start of Ray is never lost, and the handlers of before are there afterwards."""

import os
import signal
import sys
import threading
from types import FrameType

import pytest
from ray._private import worker

from alignedserve.cluster.signals import handlers_preserved


def drops(number: int, frame: FrameType | None) -> None:
    """Do nothing, as where Python drops what a handler raises: within a destructor, or right after a fork."""


def exits(number: int, frame: FrameType | None) -> None:
    sys.exit(number)


def takes_a_signal(number: signal.Signals, handler: "signal._HANDLER") -> None:
    signal.signal(number, handler)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("handler", [drops, exits])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_within_interrupts(number: signal.Signals, handler: "signal._HANDLER") -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), handlers_preserved():
        takes_a_signal(number, handler)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_another_signal_does_not() -> None:
    before = signal.signal(signal.SIGUSR1, drops)
    with handlers_preserved():
        os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_on_another_thread_it_changes_nothing() -> None:
    entered = []

    def start() -> None:
        with handlers_preserved():
            entered.append(True)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert entered == [True]


def test_an_error_that_nobody_handles_does_not_ask_a_head_that_may_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", worker.custom_excepthook)
    with handlers_preserved():
        assert sys.excepthook is worker.normal_excepthook
