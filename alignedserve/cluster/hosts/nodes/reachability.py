"""Tries before anything starts that the hosts of a cluster reach each other: each listens, all others connect.

Links and KV listen at any free port, and so does this: a firewall between two hosts shows here, with where from and
where to, not minutes later as processes that never find each other.
"""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_CONNECT_S = 5.0
_MAX_AT_ONCE = 64

Place = tuple[str, int]  # address and port


def open_port(address: str) -> socket.socket:
    """Listen at any free port of this address. Raises OSError when this host does not have it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def unreached(places: Mapping[str, Place]) -> dict[str, str]:
    """Try to connect to every place; return why for the names of those to which there is no connection."""
    if not places:
        return {}
    with ThreadPoolExecutor(min(len(places), _MAX_AT_ONCE)) as pool:
        found = zip(places, pool.map(_problem, places.values()), strict=True)
        return {name: problem for name, problem in found if problem is not None}


def _problem(place: Place) -> str | None:
    try:
        socket.create_connection(place, _CONNECT_S).close()
    except TimeoutError:
        return f"no answer in {_CONNECT_S:.0f} s: a firewall on the way?"
    except OSError as error:
        return error.strerror or str(error)
    return None
