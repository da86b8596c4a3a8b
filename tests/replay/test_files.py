"""Files of recordings: damaged, cut, foreign, too long, and without a disk to lie on."""

import errno
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from alignedserve.config.sections import BatchingConfig, RecordingConfig, RouterConfig
from alignedserve.core.errors import ConfigError, RecordingError
from alignedserve.messages.events import Ticked
from alignedserve.process.recorder import Recorder, open_recorder
from alignedserve.process.recording import FULL, PART_FILE, RecordEncoder, RecordReader
from lab.replay.component_replay import CUT, ENDS_BETWEEN, ComponentReplay, recordings_in
from router.factory import make_logic
from tests.replay.recorded import Recorded

MAKE = partial(make_logic, config=RouterConfig(), batching=BatchingConfig())
ENCODER = RecordEncoder(eos_token_ids=frozenset(), secret=b"s" * 32, keeps_tokens=False, keeps_commands=False)


def ticking(folder: Path, num_ticks: int = 10, **changes: Any) -> Path:
    """A router to which nothing happens."""
    recorded = Recorded(RecordingConfig(folder=str(folder), **changes), "router", MAKE)
    for number in range(num_ticks):
        recorded.on_event(Ticked(), number / 4)
    recorded.recorder.close()
    return sorted(folder.iterdir())[-1]


def replayed(path: Path) -> ComponentReplay:
    replay = ComponentReplay(path)
    for _ in replay.decided():
        pass
    return replay


def frame_offsets(path: Path) -> list[int]:
    return [offset for offset, _ in RecordReader(path).decisions()]


def test_a_file_that_ends_in_the_middle_of_a_decision_is_replayed_up_to_it(tmp_path: Path) -> None:
    path = ticking(tmp_path)
    path.write_bytes(path.read_bytes()[: frame_offsets(path)[6] + 20])
    replay = replayed(path)
    assert (replay.num_equal, replay.ending, replay.difference) == (6, CUT, None)


def test_a_file_that_ends_between_two_decisions_says_so(tmp_path: Path) -> None:
    path = ticking(tmp_path)
    path.write_bytes(path.read_bytes()[: frame_offsets(path)[6]])
    replay = replayed(path)
    assert (replay.num_equal, replay.ending) == (6, ENDS_BETWEEN)


@pytest.mark.parametrize("place", [0, 4, 8, 14])
def test_damage_is_named_with_its_place(tmp_path: Path, place: int) -> None:
    """In the length, its complement, the checksum and the payload of a frame."""
    path = ticking(tmp_path)
    offset = frame_offsets(path)[4]
    content = bytearray(path.read_bytes())
    content[offset + place] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=rf"router\.0\.recording is damaged at byte {offset}: "):
        replayed(path)


def test_another_version_is_named(tmp_path: Path) -> None:
    path = ticking(tmp_path)
    content = bytearray(path.read_bytes())
    content[7] = 9
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="has version 9 of the format; this is version 3"):
        ComponentReplay(path)


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\x80\x04\x95"])
def test_another_file_is_no_recording(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.recording"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="is no recording"):
        ComponentReplay(path)


def test_a_header_that_is_cut(tmp_path: Path) -> None:
    path = ticking(tmp_path)
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(RecordingError, match="ends before its header"):
        ComponentReplay(path)


class Unknown(msgspec.Struct, frozen=True):
    """An event that no component has."""

    path: str = "os.system"


def test_an_unknown_event_is_refused_by_name(tmp_path: Path) -> None:
    path = ticking(tmp_path, num_ticks=0)
    opening = ENCODER.opening("router", "router.factory.make_logic", MAKE.keywords)
    path.write_bytes(opening + ENCODER.decision(Unknown(), 0.0, []))
    with pytest.raises(RecordingError, match=f"byte {len(opening)}: no event of this component is called 'Unknown'"):
        replayed(path)


@pytest.mark.parametrize("made_by", ["os.system", "kvpool.service.KvPool", "router.factory.make_prefill_order"])
def test_no_other_function_is_looked_up(tmp_path: Path, made_by: str) -> None:
    path = tmp_path / "x.recording"
    path.write_bytes(ENCODER.opening("router", made_by, MAKE.keywords))
    with pytest.raises(RecordingError, match=f"no component is made by '{made_by}'"):
        ComponentReplay(path)


def test_arguments_of_another_program_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.recording"
    path.write_bytes(ENCODER.opening("router", "router.factory.make_logic", {"config": RouterConfig()}))
    with pytest.raises(RecordingError, match=r"its logic cannot be built: .*batching"):
        ComponentReplay(path)


def test_the_limit_ends_a_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = ticking(tmp_path, num_ticks=100, max_bytes=2000)
    replay = replayed(path)
    assert replay.ending == FULL
    assert 20 < replay.num_equal < 60
    assert path.stat().st_size <= 2100
    assert [record.message.split("recording ")[-1] for record in caplog.records] == [
        "has reached recording.max_bytes and ends here"
    ]


class FullDisk:
    """A file on a disk without room after so many bytes."""

    name = "full"

    def __init__(self, num_bytes: int) -> None:
        self._num_left = num_bytes
        self.written = b""

    def write(self, content: bytes) -> int:
        self._num_left -= len(content)
        if self._num_left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += content
        return len(content)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_a_full_disk_ends_a_recording_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    disk: Any = FullDisk(150)
    file: BinaryIO = disk
    recorder = Recorder(file, ENCODER, b"opening", 1 << 20)
    for number in range(100):
        recorder.add(Ticked(), float(number), [])
        recorder.write()
    recorder.close()
    assert [record.message for record in caplog.records] == [
        "full cannot be written and ends here: No space left on device"
    ]
    assert len(disk.written) > 80


def test_restarts_of_a_component_have_files_of_their_own_in_order(tmp_path: Path) -> None:
    for _ in range(11):
        ticking(tmp_path, num_ticks=1)
    assert [path.name for path in recordings_in(tmp_path)] == [f"router.{life}.recording" for life in range(11)]


def test_parts_of_a_node_that_came_again_are_in_the_order_of_its_coming(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        part = tmp_path / f"node-1.{number}"
        part.mkdir()
        for name in (PART_FILE, "decode-1.0.recording", "decode-1.10.recording", "decode-1.9.recording"):
            (part / name).touch()
    found = [(path.parent.name, path.name) for path in recordings_in(tmp_path)]
    assert found == [(f"node-1.{number}", f"decode-1.{life}.recording") for number in (1, 2, 10) for life in (0, 9, 10)]


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"recording\.folder .*file/x cannot be written: Not a directory"):
        open_recorder(RecordingConfig(folder=str(tmp_path / "file" / "x")), "router", MAKE)
    with pytest.raises(RecordingError, match="holds no recording of a component"):
        recordings_in(tmp_path)
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        recordings_in(tmp_path / "missing")


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert open_recorder(RecordingConfig(), "router", MAKE) is None
