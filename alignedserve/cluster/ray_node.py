"""Joins the Ray cluster that `ray up` started; the environment of Ray's own processes, wherever they are started."""

import contextlib
import logging
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray._private import services
from ray.exceptions import RayError

from alignedserve.cluster.signals import handlers_preserved
from alignedserve.config.environment import SHORT_SPINS, SPIN_VARIABLE
from alignedserve.core.errors import PeerLost, ResourceError

_ANSWER_TIMEOUT_S = 5.0
SEES_EVERY_GPU = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
# Environment of Ray's own processes. cluster.yaml sets the same for the Ray that it starts.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray notices a lost node in about a second with these, after more than ten seconds without.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # Off: Ray would kill actors, several at a time, whenever 95 % of this machine's memory is in use, by any program.
    # Our sizes are planned with memory to spare; where it is short, the kernel ends Ray's workers first.
    "RAY_memory_monitor_refresh_ms": "0",
    # Off: every node would have a page of metrics that answers anyone, at all addresses. Ours are at the gateways.
    "RAY_enable_metrics_collection": "0",
    # Ray's default is 15, with which a single busy program on this machine starves every actor for seconds.
    "RAY_worker_niceness": "0",
    # Workers share the cores with others: a thread that waits spins for microseconds and then sleeps. Sleeping at once
    # costs a system call per product.
    SPIN_VARIABLE: SHORT_SPINS,
    # Every worker sees every GPU of its host and can map memory of its peers.
    SEES_EVERY_GPU: "1",
}


class NoRayHere(ResourceError):
    """No Ray that admits others runs on this host."""


def address_here() -> str:
    """Return the address of the Ray that `ray start` runs on this host. Raises NoRayHere when there is none. Ray's own
    search (`auto`) would try an address that was noted before a restart of the host, and the Ray of a `serve`, which is
    at a loopback address and admits nobody else: for minutes."""
    running: frozenset[str] = services.find_gcs_addresses()  # type: ignore[no-untyped-call]
    hosts = {address: address.rpartition(":")[0].strip("[]") for address in running}
    reachable = sorted(address for address, host in hosts.items() if host not in ("127.0.0.1", "::1", "localhost"))
    if not reachable:
        raise NoRayHere(
            "no Ray cluster runs on this host; `alignedserve serve` starts a server that needs none, and Ctrl-C ends "
            "it; for several hosts start one with `ray up`, or set RAY_ADDRESS"
        )
    noted: str | None = services.find_bootstrap_address(None)
    return noted if noted in reachable else reachable[0]


def join_ray(address: str, namespace: str) -> None:
    """Join the Ray at this address (host:port, or auto) under its own authentication. Raises ResourceError."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_TIMEOUT_S).close()
        with handlers_preserved():
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ResourceError(
            f"cannot join the Ray cluster at RAY_ADDRESS={address}: {reason}; does it run there, and are RAY_AUTH_MODE "
            "and the token (RAY_AUTH_TOKEN, else ~/.ray/auth_token) here those it was started with?"
        ) from error


def has_ended(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def have_all_ended(references: Sequence[Any]) -> bool:
    return not references or not ray.wait(list(references), num_returns=len(references), timeout=0)[1]


def answer_of(name: object, reference: Any, timeout_s: float) -> Any:
    """Return the result of a call. Raises PeerLost naming the one that was called when it does not answer."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except (RayError, TimeoutError) as error:
        raise PeerLost(f"{name} does not answer: {str(error).splitlines()[0]}") from error


def answers_so_far(references: Sequence[Any]) -> dict[Any, Any]:
    """Return the results of calls that have ended, without waiting; None for a failed call."""
    ended = ray.wait(list(references), num_returns=len(references), timeout=0)[0] if references else []
    return {reference: answer_or_none(reference) for reference in ended}


def answer_or_none(reference: Any) -> Any:
    """Return the result of a call; None: it has failed, as its process is lost."""
    try:
        return ray.get(reference)
    except RayError:
        return None


class OpenCalls:
    """Calls of actors, by name, at most one of each; nothing waits."""

    def __init__(self) -> None:
        self._calls: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    def ask(self, name: str, reference: Any) -> None:
        self._calls[name] = reference

    def answers(self) -> dict[str, Any]:
        """Return the results that have come since; None for a failed call."""
        ended = {name: answer_or_none(call) for name, call in self._calls.items() if has_ended(call)}
        self._calls = {name: call for name, call in self._calls.items() if name not in ended}
        return ended


def kill_actors(actors: Iterable[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
