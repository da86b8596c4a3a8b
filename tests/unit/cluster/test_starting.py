"""A start takes as long as it makes progress, and what it shows meanwhile."""

import io
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typing_extensions import override

from alignedserve.batches.location import RECORDS
from alignedserve.batches.stores import sqlite_records
from alignedserve.batches.stores.sqlite_records import SqliteRecords
from alignedserve.cli.commands.serving.serve import StartScreen
from alignedserve.cluster import machine, run_folder
from alignedserve.cluster.batch_storage import _state_folder, open_batch_storage
from alignedserve.cluster.memory_planner import SizeChoice
from alignedserve.cluster.run_folder import make_run_folder, make_run_root
from alignedserve.cluster.starting import LoggingObserver, Patience
from alignedserve.config.environment import RUN_DIR_VARIABLE
from alignedserve.config.sections import BatchesConfig, ClusterConfig, ModelSectionConfig
from alignedserve.core.errors import ResourceError
from alignedserve.messages.state import SetValue
from alignedserve.process.loading_progress import LoadedShare, LoadingProgress, read_progress
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.runtime.model.weight_files import load_weights
from tests.harnesses.hosts.port_scan import (
    GATEWAY,
    LINKS,
    LOOPBACK,
    RAY_PORTS,
    RAY_WORKER_PORTS,
    RAY_WORKERS,
    Listener,
    listeners_of,
    probe,
    purpose_of,
)
from tests.support.marks import each
from tests.support.models.tiny_models import make_tiny_model

CHOICE = SizeChoice(ClusterConfig(), resolve_model(ModelSectionConfig()), ("the context is shortened",))


class Watching(LoggingObserver):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[LoadedShare] = []

    @override
    def model_loading(self, progress: LoadedShare) -> None:
        self.shown.append(progress)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_folders_of_running_clusters_stay_and_the_logs_of_the_last_that_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "run"))
    running = make_run_folder("running")
    (running / "router.sock").touch()
    for number in range(12):
        ended = running.parent / f"ended-{number}"
        ended.mkdir()
        (ended / "router.sock").touch()
        os.utime(ended, (number, number))
    os.utime(running, (0, 0))
    make_run_folder("new")
    assert (running / "router.sock").exists()
    kept = {path.name for path in running.parent.iterdir()}
    assert kept == {"running", "new", *(f"ended-{number}" for number in range(5, 12))}
    assert not list(running.parent.glob("ended-*/*.sock"))


@pytest.mark.parametrize("make", [make_run_root, lambda: _state_folder(ClusterConfig())])
def test_an_open_folder_names_the_command_that_closes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[], Path]
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir(exist_ok=True)
    (folder / "8000").mkdir(exist_ok=True)
    for path in (folder, folder / "8000"):
        path.chmod(0o755)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(folder))
    monkeypatch.setenv("ALIGNEDSERVE_STATE_DIR", str(folder))
    with pytest.raises(ResourceError, match=r"is open to others \(mode 755\).*: chmod 700 '.*/a folder(/8000)?'$"):
        make()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(ResourceError, match="belongs to another user"):
        make()


def test_folders_that_another_cluster_removes_at_the_same_time_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path / "run"))
    root = make_run_folder("running").parent
    for number in range(4):
        (root / f"ended-{number}").mkdir()

    def changed_s(path: Path) -> float:  # two leave before, two after they were looked at
        if path.name.startswith("ended"):
            path.rmdir()
        return original(path) if path.name in ("ended-0", "ended-1", "running", "new") else 1.0

    original = run_folder._changed_s
    monkeypatch.setattr(run_folder, "_changed_s", changed_s)
    make_run_folder("new")
    assert {path.name for path in root.iterdir()} == {"running", "new"}


def test_progress_prolongs_the_wait_and_all_workers_count(tmp_path: Path) -> None:
    files = [tmp_path / "prefill-0.progress", tmp_path / "decode-0.progress"]
    watching, clock = Watching(), Clock()
    patience = Patience(lambda: [read_progress(path) for path in files], 10.0, watching, clock)
    assert not patience.is_over()
    clock.now_s = 9.0
    first = LoadingProgress(files[0], 100, 2)
    LoadingProgress(files[1], 100, 2)
    assert not patience.is_over()
    clock.now_s = 18.0
    assert not patience.is_over()
    first.finish()
    assert not patience.is_over()
    assert watching.shown == [LoadedShare(), LoadedShare(0, 100, 0, 2), LoadedShare(50, 100, 1, 2)]
    clock.now_s = 28.0
    assert patience.is_over()


def test_loading_reports_every_byte_and_layer(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama")
    served = resolve_model(ModelSectionConfig(path=str(tmp_path / "model")))
    path = tmp_path / "decode-0.progress"
    total = served.config.weight_bytes("float32")
    progress = LoadingProgress(path, total, served.config.num_layers)
    assert read_progress(path) == LoadedShare(0, total, 0, 3)
    load_weights(None, served.decoder, torch.float32, observer=progress)
    progress.finish()
    assert read_progress(path) == LoadedShare(total, total, 3, 3)


def test_a_progress_that_is_absent_or_half_written_is_none(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "absent") is None
    (tmp_path / "half").write_bytes(b"1234")
    assert read_progress(tmp_path / "half") is None


def test_a_full_disk_does_not_end_the_loading(tmp_path: Path) -> None:
    progress = LoadingProgress(tmp_path / "no folder" / "x", 10, 1)
    progress.tensor_read(20)
    progress.finish()


def test_without_a_terminal_only_the_sizes_and_warnings_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with StartScreen() as screen:
        screen.sizes_chosen(CHOICE)
        screen.model_loading(LoadedShare())
        screen.model_loading(LoadedShare(5, 10, 1, 2))
        screen.model_loading(LoadedShare(10, 10, 2, 2))
    assert capsys.readouterr().err == f"{CHOICE.line()}\nwarning: the context is shortened\n"


def test_beside_other_models_sizes_and_warnings_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    with StartScreen() as screen:
        screen.sizes_chosen(CHOICE, has_others=True)
    sizes, warning = capsys.readouterr().err.splitlines()
    assert sizes == CHOICE.line().replace("Sizes:", "Sizes of pocket:")
    assert warning == "warning: pocket: the context is shortened"


def on_a_terminal(*shown: LoadedShare) -> str:
    """Return the last line that a terminal of 80 columns has of these, two seconds apart."""
    clock = Clock()
    console = Console(force_terminal=True, width=80, color_system=None, file=io.StringIO())
    with StartScreen(console, clock) as screen:
        for progress in shown:
            screen.model_loading(progress)
            clock.now_s += 2.0
        screen._bar.refresh()
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip("\n").split("\n")[-1]


def test_a_terminal_shows_bytes_layers_and_the_time_that_is_left() -> None:
    total = 15 << 30
    line = on_a_terminal(LoadedShare(0, total, 0, 32), LoadedShare(total // 4, total, 8, 32))
    assert "Loading … " in line
    assert "3.8 of 15.0 GiB, 8 of 32 layers, 6 s left" in line
    assert "of" not in on_a_terminal(LoadedShare())
    assert "0 of 600 MiB, 0 of 3 layers 0:00:00" in on_a_terminal(LoadedShare(0, 600 << 20, 0, 3))


def test_a_loaded_model_does_not_look_like_a_start_that_stands_still() -> None:
    spinning = on_a_terminal(LoadedShare(600 << 20, 600 << 20, 3, 3)).split("\r")[-1]
    assert spinning.split(" ")[0].strip("\x1b[2K") not in ("", " ")
    assert "Warming up … " in spinning
    assert "600 of 600 MiB, 3 of 3 layers" in spinning


def test_a_start_that_is_interrupted_says_that_it_stops() -> None:
    console = Console(force_terminal=True, width=80, color_system=None, file=io.StringIO())
    with StartScreen(console) as screen:
        screen.model_loading(LoadedShare(600 << 20, 600 << 20, 3, 3))
        screen.stopping()
        screen._bar.refresh()
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue().split("\r")[-1]
    assert "Stopping …" in shown
    assert "Warming up" not in shown


@pytest.mark.parametrize(("limit", "left"), [("3000\n", 2200), ("max\n", None), ("100\n", 0)])
def test_the_limit_of_a_container_counts(tmp_path: Path, limit: str, left: int | None) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 800\ninactive_file 200\n")
    found = machine._left_in_container(tmp_path)
    assert found == left or (left is None and found > 2**60)
    assert machine._left_in_container(tmp_path / "absent") > 2**60


def test_this_machine_has_what_the_system_says() -> None:
    found = machine.this_machine("cpu")
    assert found.available_bytes > 0
    assert found.num_cores == len(os.sched_getaffinity(0))
    assert found.gpu_bytes == ()


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    """A cluster whose batches are in a folder of their own."""
    tmp_path.chmod(0o700)
    return ClusterConfig(batches=BatchesConfig(folder=str(tmp_path)))


async def test_the_file_is_left_to_the_driver_of_batches_that_has_it(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other cluster waits for the process that has the file, and is refused while it lives."""
    monkeypatch.setattr(sqlite_records, "_BUSY_S", 0.1)
    former = open_batch_storage(config)
    records = SqliteRecords(tmp_path / RECORDS)
    try:
        assert await records.commit([SetValue("a", b"1")], unchanged={})
        assert former.lock is not None
        former.lock.release()  # its driver was killed
        with pytest.raises(ResourceError, match="locked"):
            open_batch_storage(config)
        adopted = open_batch_storage(config, is_adopted=True)
        assert adopted.location == former.location
        assert await records.read(["a"]) == [b"1"]
    finally:
        await records.close()
    assert adopted.lock is not None
    adopted.lock.release()


def test_a_cluster_that_was_left_before_it_had_a_file_gets_one(config: ClusterConfig, tmp_path: Path) -> None:
    adopted = open_batch_storage(config, is_adopted=True)
    assert (tmp_path / RECORDS).exists()
    assert adopted.lock is not None
    adopted.lock.release()


NODE = "10.77.0.2"
LISTING = """\
LISTEN 0      128          127.0.0.1:6384       0.0.0.0:*    users:(("ray::DashboardA",pid=107,fd=38))
LISTEN 0      4096                 *:10819            *:*    users:(("ray::DecodeActor",pid=214,fd=26))
LISTEN 0      128          10.77.0.2:41234      0.0.0.0:*    users:(("ray::DecodeActo",pid=214,fd=30))
LISTEN 0      4096 [::ffff:10.77.0.2]:10001            *:*
"""


def test_a_listing_is_read_with_programs_where_they_are_known() -> None:
    assert listeners_of(LISTING) == [
        Listener("127.0.0.1", 6384, "ray::DashboardA"),
        Listener("*", 10819, "ray::DecodeActor"),
        Listener(NODE, 41234, "ray::DecodeActo"),
        Listener("[::ffff:10.77.0.2]", 10001, ""),
    ]
    assert listeners_of("garbage\n\n") == []


@each(
    ("listener", "purpose"),
    [
        (Listener("127.0.0.1", 5000, "x"), LOOPBACK),
        (Listener("[::ffff:127.0.0.1]", 10001, "x"), LOOPBACK),
        (Listener("*", 6379, "gcs_server"), RAY_PORTS[6379]),
        (Listener("*", 10500, "ray::IDLE"), RAY_WORKERS),
        (Listener(NODE, 8000, "ray::GatewayActo"), GATEWAY),
        (Listener(NODE, 41234, "ray::DecodeActor"), LINKS),
        (Listener(NODE, 41234, "python"), None),
        (Listener("10.1.1.1", 41234, "ray::DecodeActor"), None),  # another network of the host
        (Listener("*", 41234, "ray::DecodeActor"), None),
        (Listener("0.0.0.0", 8000, "ray::GatewayActo"), None),
    ],
)
def test_a_listener_has_a_purpose_or_no_business_there(listener: Listener, purpose: str | None) -> None:
    assert purpose_of(listener, NODE, 8000) == purpose


def test_the_documentation_lists_every_port() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hosts.md").read_text(encoding="utf-8")
    table = page.partition("## Ports")[2].partition("\n## ")[0]
    workers = f"{RAY_WORKER_PORTS.start} to {RAY_WORKER_PORTS.stop - 1}"
    assert [port for port in (*map(str, RAY_PORTS), workers, "`gateway.port`") if f"| {port} |" not in table] == []


@contextmanager
def server(reply: bytes) -> Iterator[int]:
    """Listen and send every connection this reply."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(64)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5.0)


@each(
    ("reply", "is_refused"),
    [
        (b"", True),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\n\r\nsecrets", False),
        (b"\x15\x03\x03\x00\x02\x02\x28", True),  # a TLS alert
        (b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", True),  # the settings of HTTP/2
        (b"\x00\x00\x01\x00\x00\x00\x00\x00\x01x", False),  # data of HTTP/2
        (b"+PONG\r\n", False),
    ],
)
def test_an_answer_is_no_refusal(reply: bytes, is_refused: bool) -> None:
    with server(reply) as port:
        found = {one.kind: one.is_refused for one in probe("127.0.0.1", port)}
    assert found["garbage"] is found["HTTP GET"] is is_refused
