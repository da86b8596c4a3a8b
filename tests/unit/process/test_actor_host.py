"""A service in its own process: known errors are kept for its creator, any other error ends the process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import cast

import psutil
import pytest

from alignedserve.process.actor_host import ActorHost

pytestmark = pytest.mark.slow

PRELUDE = """
import asyncio, sys, time
from pathlib import Path
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.messages.events import Received, Ticked
from alignedserve.messages.handshake import Ping, Role
from alignedserve.messages.caches import LeasesReleased
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.wire import Codec
from alignedserve.process.addresses import AddressBook
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.link_manager import LinkManager

folder = Path(sys.argv[1])
spec = ProcessSpec(Role.ROUTER, "router", "c", b"s" * 32, 5.0, AddressBook(folder), folder / "logs")
CODEC = Codec(AbortRequest | Ping)


class Nothing:
    async def close(self):
        print("closed", flush=True)


class Fragile:
    def __init__(self, event):
        self._event = event

    def on_event(self, event, now):
        assert not isinstance(event, self._event), "a broken invariant"
        return []


async def fragile_driver(event):
    driver = LogicDriver(Fragile(event), spec, CODEC, print)
    await driver.links.listen(spec.addresses.of(spec.name))
    return driver


class Silent:
    def on_linked(self, peer): links.send("router", AbortRequest("r1"))
    def on_message(self, peer, message): pass
    def on_lost(self, peer): pass


async def send_it_something():
    global links
    links = LinkManager(Identity(Role.GATEWAY, "gateway-0", b"s" * 32), CODEC, Silent())
    links.dial(spec.addresses.of(spec.name))
    await asyncio.sleep(20)
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    source = PRELUDE + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", source, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )


def log_of(folder: Path) -> str:
    return (folder / "logs" / "router.log").read_text()


def test_an_error_of_the_tree_is_kept(tmp_path: Path) -> None:
    script = """
    async def build(): raise NotEnoughMemory("set pool.memory_bytes lower")
    host = ActorHost(spec, build)
    print(repr(host.failure()))
    host.stop()
    """
    over = run(tmp_path, script)
    assert (over.returncode, over.stdout) == (0, "NotEnoughMemory('set pool.memory_bytes lower')\n"), over.stderr
    assert "router cannot start" in log_of(tmp_path)


@pytest.mark.parametrize(("steps", "outcome"), [(1000, "None"), (1, "TimeoutError")])
def test_a_start_may_take_as_long_as_its_loading_makes_progress(tmp_path: Path, steps: int, outcome: str) -> None:
    script = f"""
    from alignedserve.process import actor_host
    from alignedserve.process.loading_progress import LoadingProgress
    actor_host._STALL_S = 0.2
    looks = []
    def look(path):
        if len(looks) < {steps}:
            LoadingProgress(path, 100 + len(looks), 1)
        looks.append(read(path))
        return looks[-1]
    read, actor_host.read_progress = actor_host.read_progress, look
    async def build():
        while len(looks) < 4:
            await asyncio.sleep(0.01)
        return Nothing()
    try:
        print(ActorHost(spec, build).failure())
    except TimeoutError as error:
        print(type(error).__name__)
    """
    over = run(tmp_path, script)
    assert (over.returncode, over.stdout) == (0, f"{outcome}\n"), over.stderr


def test_any_other_error_while_building_ends_the_process(tmp_path: Path) -> None:
    script = """
    async def build(): raise ValueError("not one of ours")
    ActorHost(spec, build)
    print("still here")
    """
    over = run(tmp_path, script)
    assert over.returncode != 0
    assert over.stdout == ""
    assert "not one of ours" in over.stderr


STILL_HERE = """
    time.sleep(20)
    print("still here")
"""


@pytest.mark.parametrize(
    "script",
    [
        """
    async def build():
        asyncio.get_running_loop().call_later(0.05, lambda: 1 / 0)
        return Nothing()
    host = ActorHost(spec, build)
    """,
        """
    async def build(): return await fragile_driver(Ticked)
    host = ActorHost(spec, build)
    """,
        """
    async def build(): return await fragile_driver(Received)
    host = ActorHost(spec, build)
    asyncio.run(send_it_something())
    """,
    ],
    ids=["in a callback", "at a tick", "at a message"],
)
def test_whatever_breaks_later_ends_the_process(tmp_path: Path, script: str) -> None:
    over = run(tmp_path, script + STILL_HERE)
    assert over.returncode == 70, (over.stdout, over.stderr)
    assert over.stdout == ""
    assert "router is broken and ends" in log_of(tmp_path)


def test_a_peer_that_goes_away_while_we_write_is_no_reason_to_end(tmp_path: Path) -> None:
    script = """
    async def build():
        def fail(): raise ConnectionResetError("gone")
        asyncio.get_running_loop().call_later(0.01, fail)
        return Nothing()
    host = ActorHost(spec, build)
    time.sleep(0.2)
    host.stop()
    """
    over = run(tmp_path, script)
    assert (over.returncode, over.stdout) == (0, "closed\n"), over.stderr


def test_a_gateway_whose_log_nobody_reads_goes_on(tmp_path: Path) -> None:
    script = """
    import dataclasses, logging
    async def build():
        for _ in range(20_000):
            logging.warning("a hundred characters" * 5)
        return Nothing()
    host = ActorHost(dataclasses.replace(spec, role=Role.GATEWAY, name="gateway-0"), build)
    host.stop()
    """
    log = tmp_path / "logs" / "gateway-0.log"
    log.parent.mkdir()
    os.mkfifo(log)
    unread = os.open(log, os.O_RDWR)
    over = run(tmp_path, script)
    os.close(unread)
    assert (over.returncode, over.stdout) == (0, "closed\n"), over.stderr


def test_what_a_gateway_has_logged_is_written_when_it_ends(tmp_path: Path) -> None:
    script = """
    import dataclasses, logging
    async def build():
        for number in range(5000):
            logging.warning("line %d", number)
        return Nothing()
    ActorHost(dataclasses.replace(spec, role=Role.GATEWAY, name="gateway-0"), build)
    """
    over = run(tmp_path, script)
    assert over.returncode == 0, over.stderr
    lines = (tmp_path / "logs" / "gateway-0.log").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == [str(number) for number in range(5000)]


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_memory_that_processes_share_is_counted_once() -> None:
    """The C library, at least, is another process's too."""
    assert 0 < ActorHost.memory_bytes(cast(ActorHost, None)) < psutil.Process().memory_info().rss
