"""A real server with S3's interface, in a process of its own, for tests that kill it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from alignedserve.batches.stores.object_location import ObjectStoreLocation
from tests.support.ports import free_port

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
URL = "s3://files-of-tests/cluster"


class S3Server:
    """moto's server with one bucket. What it holds ends with it. It may refuse all credentials."""

    def __init__(self, port: int, *, is_closed: bool = False) -> None:
        # moto then lets in one request, which creates the bucket, and after it only users that it knows.
        self._environment = os.environ | ({"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if is_closed else {})
        self.endpoint = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def location(self) -> ObjectStoreLocation:
        return ObjectStoreLocation(URL, self.endpoint, CREDENTIALS)

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=self._environment, **quiet)  # type: ignore[call-overload]
        deadline_s = time.monotonic() + 60.0
        while time.monotonic() < deadline_s:
            with contextlib.suppress(urllib.error.URLError, OSError):
                put = urllib.request.Request(f"{self.endpoint}/files-of-tests", method="PUT")
                urllib.request.urlopen(put, timeout=10.0).close()
                return
            time.sleep(0.05)
        raise AssertionError("moto's server does not answer")

    def suspend(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def s3_server(*, is_closed: bool = False) -> Iterator[S3Server]:
    server = S3Server(free_port(), is_closed=is_closed)
    server.start()
    try:
        yield server
    finally:
        server.kill()
