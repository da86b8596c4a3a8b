"""The owners of batches that other APIs than Files make from requests of their own, and what only their lines have.

They belong to an owner beside the client's own, so that each API lists only what it made; limits of batches hold for
each of them.
"""

from typing import Any

BACKGROUND = "background"
STREAMED_RESPONSE = "streamed_response"  # field of a line whose events are written


def api_owner(client: str, api: str) -> str:
    """Return the owner of the batches that an API makes for this client."""
    return f"{client}/{api}"


def client_of(owner: str) -> str:
    """Return the client whose batch this owner has."""
    return owner.partition("/")[0]


def is_client(owner: str) -> bool:
    """Return True for a client itself: its files are in its own list, and its own to delete."""
    return client_of(owner) == owner


def take_streamed_response(body: dict[str, Any], owner: str) -> dict[str, Any] | None:
    """Take from a line's body the response as it was queued; None where no events are to be written.

    Only lines that a gateway makes have it: in those of clients, whose owners are others, it is an unknown field.
    """
    return body.pop(STREAMED_RESPONSE, None) if owner.endswith(f"/{BACKGROUND}") else None
