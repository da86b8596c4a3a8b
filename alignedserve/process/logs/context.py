"""Which request a process is at: its id is in every line that is logged meanwhile.

A gateway's id of a request, 32 hexadecimal digits, begins the ids of everything that the cluster does for it
(`ID-0`, `ID-1` for its choices), so that one search finds a request's lines in the logs of all processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

current_request: ContextVar[str] = ContextVar("current_request", default="")


@contextmanager
def about_request(request_id: str) -> Iterator[None]:
    """Let lines that are logged within carry this id, those of tasks that begin there as well."""
    token = current_request.set(request_id)
    try:
        yield
    finally:
        current_request.reset(token)
