"""Trials of libraries with a GPU's times pinned."""

import pytest

from alignedserve.runtime.attention.libraries import AttentionLibrary
from alignedserve.runtime.attention.library_trial import Trial
from alignedserve.runtime.attention.prompt_choice import TrialResult
from alignedserve.runtime.device.timing import DeviceTimer
from tests.support.prompt_setups import setup_of


def tried(library: AttentionLibrary, monkeypatch: pytest.MonkeyPatch, window: int | None = None) -> TrialResult:
    """Return the result of a trial in which our kernel takes two seconds and the library one."""
    monkeypatch.setattr(DeviceTimer, "by_turns", lambda self, works: [2.0, 1.0])
    return Trial(setup_of(window), library).result()
