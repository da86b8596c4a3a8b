"""Ports for servers of tests."""

import socket


def free_port() -> int:
    """Return a port of any address of this host that nobody else is given as long as this process runs.

    It is bound and not listened at: the system then gives it to no socket that asks for any port, and a server that
    names it may still have it (SO_REUSEADDR, which servers set). One that was only looked up is another's in one of
    some hundred starts of a cluster: Ray asks for a score of ports before a gateway takes its own.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = int(held.getsockname()[1])
        held.detach()
    return port
