"""Stands in for the two agents of Ray's node process: it says that it serves nothing, and waits for the end.

Ray starts agents for its dashboard and for environments of single actors, of which a cluster of one host has neither.
They take 130 MiB and three seconds of a core's time at the start. This file runs alone, by `python -I -S`: it imports
little, and nothing of this package.
"""

import os
import sys

# What a node process waits for: a file for every port. -1: there is none. It asks the last one alone, and only for
# actors with an environment of their own.
_PORTS = {
    "dashboard_agent": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env_agent": ("runtime_env_agent_port",),
}


def main(kind: str, arguments: list[str]) -> None:
    """Write the files, and end when the node process does, which has the other end of the standard input."""
    options = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    for name in _PORTS[kind]:
        path = os.path.join(options["session-dir"], f"{name}_{options['node-id']}")
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write("1" if kind == "runtime_env_agent" else "-1")
        os.rename(f"{path}.new", path)
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
