"""Large files: gone on with after cuts and kills, checked, waited for, and stopped."""

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.hub import resumed_download
from alignedserve.runtime.model.hub.resumed_download import Download, DownloadStopped, RemoteFile
from tests.support.servers.hub_samples import REPO, WEIGHTS
from tests.support.servers.hub_server import HubServer

pytestmark = pytest.mark.slow

DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
HALF = len(WEIGHTS) // 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resumed_download, "_FIRST_PAUSE_S", 0.001)
    return tmp_path


class Counted:
    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def start(
    server: HubServer, folder: Path, etag: str = DIGEST, num_bytes: int = len(WEIGHTS)
) -> tuple[Download, Counted]:
    url = f"{server.url}/{REPO}/resolve/main/model.safetensors"
    counted = Counted()
    file = RemoteFile(url, etag, num_bytes)
    return Download(file, folder, count=counted.add, stop=threading.Event(), token=None), counted


def assert_whole(folder: Path, counted: Counted) -> None:
    assert (folder / DIGEST).read_bytes() == WEIGHTS
    assert [path.name for path in folder.iterdir()] == [DIGEST]
    assert counted.num_bytes == len(WEIGHTS)


def ranges(server: HubServer) -> list[str]:
    return [seen.headers.get("range", "") for seen in server.downloads()]


def test_cut_again_and_again(server: HubServer, folder: Path) -> None:
    server.cut_after = [1_000_000, 700_000, 0, 300_000]
    download, counted = start(server, folder)
    download.run()
    assert_whole(folder, counted)
    assert len(ranges(server)) == 5
    assert sum(seen == "" for seen in ranges(server)) == 1


@pytest.mark.parametrize("half", [b"x" * HALF, b"x" * (len(WEIGHTS) + 5), WEIGHTS + b"!"])
def test_a_half_of_something_else_is_started_over(server: HubServer, folder: Path, half: bytes) -> None:
    (folder / f"{DIGEST}.incomplete").write_bytes(half)
    download, counted = start(server, folder)
    download.run()
    assert_whole(folder, counted)


def test_a_whole_file_under_the_name_of_a_half(server: HubServer, folder: Path) -> None:
    (folder / f"{DIGEST}.incomplete").write_bytes(WEIGHTS)
    download, counted = start(server, folder)
    download.run()
    assert_whole(folder, counted)
    assert ranges(server) == []


def test_a_server_without_ranges(server: HubServer, folder: Path) -> None:
    server.ignores_ranges = True
    (folder / f"{DIGEST}.incomplete").write_bytes(WEIGHTS[:HALF])
    download, counted = start(server, folder)
    download.run()
    assert_whole(folder, counted)


def test_temporary_failures_are_tried_again_and_others_are_not(server: HubServer, folder: Path) -> None:
    server.failures = [503, 429, 500, 416]
    download, counted = start(server, folder)
    download.run()
    assert_whole(folder, counted)
    (folder / DIGEST).unlink()
    server.failures = [403]
    with pytest.raises(HfHubHTTPError):
        start(server, folder)[0].run()
    server.failures = [503] * 100
    with pytest.raises(HfHubHTTPError):
        start(server, folder)[0].run()
    assert len(server.failures) == 100 - 7


def test_more_bytes_than_listed_are_refused(server: HubServer, folder: Path) -> None:
    with pytest.raises(ModelError, match="sends more than the 1000 bytes"):
        start(server, folder, num_bytes=1000)[0].run()


@pytest.mark.parametrize("etag", ["", "../../../etc/passwd", "a/b", ".", "..", "a" * 200, "a\0b", "-x"])
def test_an_etag_is_never_a_path(server: HubServer, folder: Path, etag: str) -> None:
    with pytest.raises(ModelError, match="as its ETag"):
        start(server, folder, etag=etag)


def test_a_digest_of_git_is_checked_too(server: HubServer, folder: Path) -> None:
    digest = hashlib.sha1(b"blob %d\0" % len(WEIGHTS) + WEIGHTS, usedforsecurity=False).hexdigest()
    start(server, folder, etag=digest)[0].run()
    assert (folder / digest).read_bytes() == WEIGHTS
    with pytest.raises(ModelError, match="damaged"):
        start(server, folder, etag="0" * 40)[0].run()


def test_several_at_once_download_it_once(server: HubServer, folder: Path) -> None:
    server.bytes_per_s = 20 * len(WEIGHTS)
    downloads = [start(server, folder) for _ in range(4)]
    threads = [threading.Thread(target=download.run) for download, _ in downloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    for _, counted in downloads:
        assert_whole(folder, counted)
    assert ranges(server) == [""]


def test_it_can_be_stopped_while_it_receives_and_while_it_waits(server: HubServer, folder: Path) -> None:
    server.bytes_per_s = len(WEIGHTS) / 10  # it still receives when it is stopped, however late that is seen here
    stop = threading.Event()
    file = RemoteFile(f"{server.url}/{REPO}/resolve/main/model.safetensors", DIGEST, len(WEIGHTS))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            Download(file, folder, count=lambda num_bytes: None, stop=stop, token=None).run()
        except DownloadStopped as stopped:
            ended.append(stopped)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(server.downloads()))
    stop.set()
    for thread in threads:
        thread.join(10.0)
    assert len(ended) == 2


def wait_until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.005)
