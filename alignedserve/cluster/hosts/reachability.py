"""Whether the hosts of a cluster reach each other, tried before anything starts: each listens, all others connect.

Links and KV listen at any free port, and so does this: a firewall between two hosts shows here, with where from and
where to, not minutes later as processes that never find each other.
"""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from alignedserve.cluster.hosts.ray_nodes import RayNode

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


def apart(nodes: Mapping[RayNode, Place], problems: Mapping[RayNode, Mapping[str, str]]) -> dict[RayNode, str]:
    """Return why for each node that does not reach a node before it, or is not reached by one.

    `nodes`: the head first, which is never refused for another; nor is a node for one that is refused. `problems`: what
    `unreached` returned on each node, by node ids.
    """
    refused: dict[RayNode, str] = {}
    used: list[RayNode] = []
    for node, place in nodes.items():
        for other in used:
            way = problems[other].get(node.node_id)
            if way is not None:
                refused[node] = _sentence(other, node, place, way)
                break
            back = problems[node].get(other.node_id)
            if back is not None:
                refused[node] = _sentence(node, other, nodes[other], back)
                break
        else:
            used.append(node)
    return refused


def _sentence(source: RayNode, target: RayNode, place: Place, problem: str) -> str:
    return f"no connection from {source} to {target}, TCP port {place[1]} ({problem})"
