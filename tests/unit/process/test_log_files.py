"""Logs whose disk is full, or hangs."""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.messages.handshake import Role
from alignedserve.process import logs
from alignedserve.process.addresses import FIRST_DEPLOYMENT, AddressBook, deployed_name
from alignedserve.process.background_tasks import outlived, start_background
from alignedserve.process.logs import LogFileHandler, QueuedLogHandler, about_request
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.worker_threads import run_quietly


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


# Work at low priority: on its own thread, whose threads are quiet too, and nothing else's priority changes.


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_it_and_what_it_starts_are_of_low_priority_and_nothing_else_is() -> None:
    before = niceness()

    def work() -> tuple[int, int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(niceness()))
        thread.start()
        thread.join()
        return niceness(), found[0]

    assert run_quietly(work) == (10, 10)
    assert niceness() == before


def test_its_errors_are_raised() -> None:
    def fail() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        run_quietly(fail)


# A background task that breaks is heard of; one that is cancelled is not.


async def test_a_broken_task_reaches_the_loop() -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))

    async def breaks() -> None:
        raise ZeroDivisionError

    start_background(breaks(), "the division")
    endless = start_background(asyncio.sleep(60), "the wait")
    await asyncio.sleep(0)
    endless.cancel()
    await asyncio.sleep(0.01)
    assert [context["message"] for context in heard] == ["the division failed"]
    assert isinstance(heard[0]["exception"], ZeroDivisionError)


async def test_the_error_of_work_whose_waiter_is_gone_ends_nothing() -> None:
    """A cancelled line of a batch, whose grammar then failed, ended the process some time later."""
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiter = asyncio.create_task(outlived(work))
    await asyncio.sleep(0)
    waiter.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiter
    work.set_exception(ZeroDivisionError())
    await asyncio.sleep(0)
    del work, waiter
    gc.collect()
    assert heard == []


# Names of processes in a cluster of several deployments.


def spec(deployment_id: str) -> ProcessSpec:
    book = AddressBook(Path("/run/x"))
    return ProcessSpec(
        role=Role.DECODE_WORKER,
        name=deployed_name("decode-0", deployment_id),
        cluster_id="x",
        secret=bytes(32),
        peer_timeout_s=1.0,
        addresses=book,
        log_folder=Path("/run/x/logs"),
        deployment_id=deployment_id,
    )


def test_the_first_deployment_has_plain_names() -> None:
    assert (spec(FIRST_DEPLOYMENT).name, spec(FIRST_DEPLOYMENT).router_name) == ("decode-0", "router")


def test_processes_of_another_deployment_have_names_and_sockets_of_their_own() -> None:
    other = spec("2")
    assert (other.name, other.router_name) == ("decode-0.2", "router.2")
    assert other.addresses.of(other.router_name) == "unix:/run/x/router.2.sock"
