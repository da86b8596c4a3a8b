"""Processor time of the tokens of an iteration on their way to gateways, near and on other hosts.

python -m benchmarks.serving.token_messages

A process sends what a worker sends after every iteration of eight requests, at the pace of iterations, to one or three
gateways, each a process: over Unix sockets, as on one node, and over TLS, as to other nodes (here by loopback). All
processes' time counts, so that waking up does.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

import uvloop

from alignedserve.core.ids import RequestId
from alignedserve.messages.gateways import TokenDelta, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import GatewayInbound
from alignedserve.messages.wire import Codec
from alignedserve.process.links import Identity, Link, connect, listen, real_address
from alignedserve.process.tls import CertificateAuthority
from benchmarks.support.recording import write_result

_NUM_REQUESTS = 8
_ITERATION_S = 0.008
_SECRET = b"s" * 32
_UNIX, _TLS = "unix", "tls"
CASES = {
    "one gateway, on the node": (_UNIX,),
    "three gateways, on the node": (_UNIX,) * 3,
    "three gateways, two of them on other hosts": (_UNIX, _TLS, _TLS),
}


def _identity(authority: CertificateAuthority, name: str) -> Identity:
    return Identity(Role.GATEWAY, name, _SECRET, 5.0, authority.issue(name))


def _link(identity: Identity, linked: threading.Event | asyncio.Event | None = None) -> Link:
    return Link(
        identity,
        Codec(GatewayInbound),
        is_dialler=linked is not None,
        on_linked=lambda link: linked.set() if linked is not None else None,
        on_message=lambda link, message: None,
        on_lost=lambda link: None,
    )


async def _receive(
    identity: Identity, address: str, places: "Queue[str]", begins: Event, ends: Event, spent: "Queue[float]"
) -> None:
    server = await listen(address, lambda: _link(identity), identity)
    places.put(real_address(server.sockets[0], address))
    await asyncio.to_thread(begins.wait)
    began_s = time.process_time()
    await asyncio.to_thread(ends.wait)
    spent.put(time.process_time() - began_s)


async def _send(
    identity: Identity, places: Sequence[str], num_iterations: int, begins: Event, ends: Event, spent: "Queue[float]"
) -> None:
    links = []
    for place in places:
        linked = asyncio.Event()
        links.append(await connect(place, lambda: _link(identity, linked), identity))  # noqa: B023  (made before the next)
        await linked.wait()
    deltas = [TokenDelta(RequestId(f"chatcmpl-{number:024d}"), 7, (number,)) for number in range(_NUM_REQUESTS)]
    messages = [TokensEmitted(tuple(deltas[number :: len(links)])) for number in range(len(links))]
    begins.set()
    began_s, next_s = time.process_time(), time.monotonic()
    for _ in range(num_iterations):
        for link, message in zip(links, messages, strict=True):
            link.send(message)
        next_s += _ITERATION_S
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    spent.put(time.process_time() - began_s)
    ends.set()


def _run(main: Any, *arguments: Any) -> None:
    uvloop.run(main(*arguments))


def measure(kinds: Sequence[str], num_iterations: int) -> float:
    """Return the microseconds of an iteration's messages, in all processes together."""
    fork = multiprocessing.get_context("fork")
    authority = CertificateAuthority.new("benchmark")
    places, spent, begins, ends = fork.Queue(), fork.Queue(), fork.Event(), fork.Event()
    with tempfile.TemporaryDirectory() as folder:
        addresses = [
            f"unix:{folder}/{number}" if kind == _UNIX else "tls:127.0.0.1:0" for number, kind in enumerate(kinds)
        ]
        processes = [
            fork.Process(
                target=_run, args=(_receive, _identity(authority, f"g{number}"), address, places, begins, ends, spent)
            )
            for number, address in enumerate(addresses)
        ]
        for process in processes:
            process.start()
        found = [places.get() for _ in processes]
        sending = (_send, _identity(authority, "worker"), found, num_iterations, begins, ends, spent)
        processes.append(fork.Process(target=_run, args=sending))
        processes[-1].start()
        seconds: float = sum(spent.get() for _ in processes)
        for process in processes:
            process.join()
    return 1e6 * seconds / num_iterations


def main() -> None:
    """Measure the cases in turn, and record their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--name", default="token_messages")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, kinds in CASES.items():
            found[name].append(round(measure(kinds, options.iterations), 1))
    medians = {name: statistics.median(times) for name, times in found.items()}
    print({name: f"{median:.0f} us per iteration" for name, median in medians.items()})
    print(write_result(options.name, {"requests": _NUM_REQUESTS, "us_per_iteration": medians, "rounds": found}))


if __name__ == "__main__":
    main()
