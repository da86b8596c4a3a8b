"""Stands in for the command of a worker: it asks the template of workers for one (see worker_template.py) and ends.

Without a template it becomes the command. This file runs alone, by `python -I -S`: it imports little, and nothing of
this package.
"""

import os
import socket
import sys


def main(address: str, command: list[str]) -> None:
    """Hand the order over: this process's folder, the command's words, the environment and the three open files."""
    order = [os.getcwd(), str(len(command)), *command, *(f"{name}={value}" for name, value in os.environ.items())]
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect(address)
            socket.send_fds(template, [b"\0"], [0, 1, 2])
            template.sendall(b"\0".join(map(os.fsencode, order)))
            template.shutdown(socket.SHUT_WR)
            if template.recv(1):
                return
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
