"""What Ray says to its driver goes to a file, not to the terminal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import worker

from alignedserve.cluster.local_ray.start import keep_messages


@pytest.fixture
def _own_function() -> Iterator[None]:
    own = worker.print_to_stdstream
    yield
    worker.print_to_stdstream = own


@pytest.mark.usefixtures("_own_function")
def test_a_message_that_a_full_disk_cannot_take_is_lost_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    keep_messages(Path("/dev/full"))
    worker.print_to_stdstream({"lines": ["an actor has died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("_own_function")
def test_messages_go_to_the_file_that_was_named_last(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "logs" / "first.log", tmp_path / "logs" / "second.log"
    keep_messages(first)
    worker.print_to_stdstream({"lines": ["an actor has died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    keep_messages(second)
    worker.print_to_stdstream({"lines": ["another"], "pid": "raylet", "is_err": True}, ignore_prefix=False)
    assert first.read_text().endswith("raylet: an actor has died\n")
    assert second.read_text().endswith("raylet: another\n")
    assert capfd.readouterr() == ("", "")
