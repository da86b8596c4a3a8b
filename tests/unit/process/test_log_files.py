"""Logs whose disk is full, or hangs."""

import fcntl
import logging
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.process import logs
from alignedserve.process.logs import LogFileHandler, QueuedLogHandler, about_request


def test_what_a_full_disk_does_not_take_is_lost_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, path = logging.getLogger("tests.full"), tmp_path / "router-0.log"
    path.symlink_to("/dev/full")
    handler = LogFileHandler(path)
    logger.addHandler(handler)
    logger.propagate = False
    for _ in range(3):
        logger.warning("nobody reads this")
    path.unlink()
    logger.removeHandler(handler)
    handler.close()
    assert capfd.readouterr() == ("", "")


def test_lines_tell_when_who_and_how_bad(tmp_path: Path) -> None:
    logger, path = logging.getLogger("tests.written"), tmp_path / "router-0.log"
    handler = LogFileHandler(path)
    logger.addHandler(handler)
    logger.warning("a worker was lost")
    logger.removeHandler(handler)
    handler.close()
    assert path.read_text().endswith(" WARNING tests.written: a worker was lost\n")


def warn(handler: logging.Handler, *messages: str) -> None:
    for message in messages:
        handler.handle(logging.getLogger().makeRecord("tests", logging.WARNING, "", 0, message, (), None))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A log that hangs until the empty lines in it are read."""
    path = tmp_path / "gateway-0.log"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)
    os.write(held, b"\n" * fcntl.fcntl(held, fcntl.F_GETPIPE_SZ))
    yield path
    os.close(held)


def test_a_log_that_hangs_holds_up_nobody_and_says_what_it_has_lost(
    pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_FLUSH_S", 20.0)
    handler = QueuedLogHandler(pipe, max_lines=10)
    warn(handler, *(f"line {number}" for number in range(100)))
    read: list[str] = []

    def read_all() -> None:
        with open(pipe) as log:
            while not (read and read[-1].endswith("the last")):
                read.extend(line for line in [log.readline().rstrip()] if line)

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    handler.flush()
    warn(handler, "the last")
    handler.close()
    reader.join(10.0)
    assert not reader.is_alive()
    *first, lost, _ = read
    assert [line.rpartition(" ")[2] for line in first] == [str(number) for number in range(len(first))]
    assert len(first) in (10, 11)  # one may have been on its way to the disk
    assert lost.endswith(f": {100 - len(first)} lines are lost here, as the log could not be written")


def test_a_log_that_hangs_does_not_hold_up_the_end(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_FLUSH_S", 0.01)
    handler = QueuedLogHandler(pipe, max_lines=10)
    warn(handler, *["nobody reads this"] * 100)
    for _ in range(2):
        handler.close()
    assert handler._lines.unfinished_tasks >= 10
    with open(pipe, "rb", buffering=0) as log:  # so that its thread ends
        while handler._lines.unfinished_tasks:
            if select.select([log], [], [], 0.01)[0]:
                log.read(1 << 16)
    handler._writer.stop()
    handler._file.close_file()


def test_a_line_that_another_thread_writes_names_its_request(tmp_path: Path) -> None:
    path = tmp_path / "gateway-0.log"
    handler = QueuedLogHandler(path)
    with about_request("5" * 32):
        warn(handler, "it is slow")
    handler.close()
    assert path.read_text().endswith(f" WARNING tests: it is slow [{'5' * 32}]\n")
