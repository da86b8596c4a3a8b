"""Hosts made of namespaces on one machine: network, processes, mounts, names and IPC of their own, and an SSH server.

Each host has an address on a bridge, its own /tmp, /dev/shm and home, and shares the file system otherwise. Killing a
host's first process kills everything on it at once, as a power cut does. Needs root, iproute2, util-linux and
openssh-server, and says so.
"""

import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from typing_extensions import override

from alignedserve.core.errors import ResourceError

_TOOLS = ("ip", "unshare", "nsenter", "mount", "sshd", "ssh", "ssh-keygen", "rsync", "iptables")
_UP_S = 10.0
_NETWORK = "10.77"
BRIDGE = "alsv"
# A bridge without an address of its own takes the lowest of its ports', and another when that host is lost: the others
# would go on sending to the former one for up to a minute, as to a host that is there.
_BRIDGE_ADDRESS = "02:61:6c:73:76:01"
_TURN = Path("/run/alsv.lock")  # one set of hosts at a time: all have the same bridge and addresses

# Inside the new namespaces, as the first process of the host. $KEPT: folders under /tmp or home that it must still see.
_INIT = """
set -e
hostname "$NAME"
ip link set lo up
kept=0
for folder in $KEPT; do mkdir -p "$BASE/kept/$kept"; mount --bind "$folder" "$BASE/kept/$kept"; kept=$((kept+1)); done
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777,size=2g tmpfs /dev/shm
mkdir -p "$HOME"
mount --bind "$BASE/$NAME" "$HOME"
kept=0
for folder in $KEPT; do mkdir -p "$folder"; mount --bind "$BASE/kept/$kept" "$folder"; kept=$((kept+1)); done
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e -f "$BASE/sshd_config"
"""
_SSHD_CONFIG = """
HostKey {base}/host_key
AuthorizedKeysFile {base}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""


def obstacle() -> str | None:
    """Return why no hosts can be made here; None: they can."""
    if os.geteuid() != 0:
        return "namespaces with networks of their own need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None and not Path(f"/usr/sbin/{tool}").exists()]
    if missing:
        return f"{', '.join(missing)} missing (Debian: apt install iproute2 util-linux openssh-server rsync iptables)"
    is_allowed = _try("unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "true")
    return None if is_allowed else "the kernel does not allow new namespaces here"


@dataclass(slots=True)
class NamespaceHost:
    """One host."""

    name: str
    address: str
    process: "subprocess.Popen[bytes] | None" = None

    @override
    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    def run(self, *command: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Run a command on the host and return its result."""
        assert self.process is not None, "a host that is down"
        (first,) = _children(self.process.pid)
        inside = ["nsenter", "--target", str(first), "--net", "--pid", "--mount", "--uts", "--ipc"]
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"  # root's tools, also for who is root by other ways
        return subprocess.run(
            [*inside, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PATH": path},
        )

    def processes(self) -> list[str]:
        """Return the command lines of everything that runs on the host, but its SSH server and the question itself."""
        lines = self.run("ps", "-eww", "-o", "args=").stdout.splitlines()
        return [line for line in lines if "sshd" not in line and not line.startswith("ps ")]


class NamespaceHosts:
    """Several hosts on one bridge; used as a context manager. `base` holds their keys, homes and logs."""

    def __init__(self, count: int, base: Path, kept: Sequence[Path] = ()) -> None:
        """`kept`: folders that every host sees, though they lie under /tmp or the home."""
        self.base = base
        self.key = base / "key"
        self.hosts = [NamespaceHost(f"host{number}", f"{_NETWORK}.0.{number + 1}") for number in range(count)]
        hidden = (Path("/tmp"), Path.home())
        folders = {folder.resolve() for folder in (Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), *kept)}
        self._kept = sorted(str(one) for one in folders if any(one.is_relative_to(other) for other in hidden))

    def __enter__(self) -> "NamespaceHosts":
        reason = obstacle()
        if reason is not None:
            raise ResourceError(f"no hosts can be made here: {reason}")
        self._turn = _take_turn()
        try:
            self.base.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("key", "host_key"):
                call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.base / name))
            (self.base / "sshd_config").write_text(_SSHD_CONFIG.format(base=self.base), encoding="ascii")
            self._remove_network()
            call("ip", "link", "add", BRIDGE, "address", _BRIDGE_ADDRESS, "type", "bridge")
            call("ip", "address", "add", f"{_NETWORK}.0.254/24", "dev", BRIDGE)
            call("ip", "link", "set", BRIDGE, "up")
            for host in self.hosts:
                self.boot(host)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def boot(self, host: NamespaceHost) -> None:
        """Start a host that is down, with an empty home but for its shell's start-up file."""
        home = self.base / host.name
        home.mkdir(exist_ok=True)
        for name in (".bashrc", ".profile"):
            template = self.base / "bashrc"
            (home / name).write_text(template.read_text(encoding="utf-8") if template.exists() else "")
        environment = {"NAME": host.name, "BASE": str(self.base), "KEPT": " ".join(map(shlex.quote, self._kept))}
        spaces = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        with (self.base / f"{host.name}.log").open("ab") as log:
            host.process = subprocess.Popen(
                [*spaces, "sh", "-c", f"while ! ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done\n{_INIT}"],
                env=os.environ | environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        self._connect(host)
        _wait(lambda: _reaches(host.address), f"{host.name} has no SSH server; see {self.base}/{host.name}.log")

    def kill(self, host: NamespaceHost) -> None:
        """End everything on the host at once."""
        if host.process is not None:
            host.process.send_signal(signal.SIGKILL)
            host.process.wait()
            host.process = None

    def remove(self) -> None:
        """Kill all hosts and remove the bridge."""
        for host in self.hosts:
            self.kill(host)
        self._remove_network()
        self._turn.close()

    def _connect(self, host: NamespaceHost) -> None:
        """Give the host its interface, an address and a default route, without which Ray takes the loopback's."""
        assert host.process is not None, "a host that is down"
        outer, pid = f"{BRIDGE}-{host.name}", host.process.pid
        _wait(lambda: bool(_children(pid)), f"{host.name} did not start")
        (first,) = _children(pid)
        _try("ip", "link", "delete", outer)
        # The same hardware address after every boot: the others remember it.
        own = f"02:00:00:00:00:{int(host.address.rpartition('.')[2]):02x}"
        call("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "address", own, "netns", str(first))
        call("ip", "link", "set", outer, "master", BRIDGE, "up")
        inside = ("nsenter", "--target", str(first), "--net", "ip")
        call(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        call(*inside, "link", "set", "eth0", "up")
        call(*inside, "route", "add", "default", "via", f"{_NETWORK}.0.254")

    def _remove_network(self) -> None:
        for name in (*(f"{BRIDGE}-{host.name}" for host in self.hosts), BRIDGE):
            _try("ip", "link", "delete", name)


def _take_turn() -> IO[str]:
    """Return the lock that is held until it is closed. Raises ResourceError when there are other hosts."""
    turn = _TURN.open("w", encoding="ascii")
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        turn.close()
        raise ResourceError("there are other hosts of namespaces on this machine; one set at a time") from None
    return turn


def _children(pid: int) -> list[int]:
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _reaches(address: str) -> bool:
    try:
        socket.create_connection((address, 22), timeout=0.5).close()
    except OSError:
        return False
    return True


def _try(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def call(*command: str) -> None:
    """Run a command. Raises ResourceError with its words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")


def _wait(holds: Callable[[], bool], problem: str) -> None:
    ends_s = time.monotonic() + _UP_S
    while not holds():
        if time.monotonic() > ends_s:
            raise ResourceError(problem)
        time.sleep(0.05)
