"""Of what class and client the request is that a task of the gateway serves, for what all requests share: lanes of
threads, fetches.

A task says so once it is known, or likely; until then somebody waits, and the client is nobody in particular.
"""

from contextvars import ContextVar

from alignedserve.core.request import RequestClass

_class: ContextVar[RequestClass] = ContextVar("request_class", default=RequestClass.REAL_TIME)
_client: ContextVar[str] = ContextVar("client", default="")


def note_class(request_class: RequestClass) -> None:
    """Note of what class the request of this task is."""
    _class.set(request_class)


def is_best_effort() -> bool:
    return _class.get() is RequestClass.BEST_EFFORT


def note_client(client: str) -> None:
    """Note whose request this task serves, so that one client's requests do not hold up another's."""
    _client.set(client)


def client_of_task() -> str:
    return _client.get()
