"""A server that cannot be reached is named with the reason, in words."""

import errno
import socket

import aiohttp
import pytest

from alignedserve.client.openai_client import OpenAiClient
from alignedserve.client.unreachable import unreachable
from alignedserve.core.errors import PeerLost

URL = "http://server:8000"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "x"),
            f"nothing answers at {URL}; `alignedserve serve` starts a server",
        ),
        (OSError(errno.EHOSTUNREACH, "x"), f"nothing answers at {URL} (No route to host)"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), f"no host is known by the name in {URL} (unknown)"),
        (TimeoutError(), f"{URL} does not answer in time"),
        (aiohttp.InvalidURL(URL), f"{URL} is no address of a server"),
        (
            aiohttp.ServerDisconnectedError(),
            f"{URL} closes the connection without an answer; its address may begin with https://",
        ),
        (aiohttp.ClientPayloadError(), f"nothing answers at {URL} (ClientPayloadError)"),
    ],
)
def test_the_reason_is_told_in_words(error: Exception, words: str) -> None:
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    assert str(unreachable(URL, error)) == words
    if not isinstance(error, aiohttp.ClientError) or isinstance(error, aiohttp.InvalidURL):
        assert str(unreachable(URL, wrapped)) == words


async def test_clients_tell_it() -> None:
    with socket.socket() as free:  # bound, and nobody listens
        free.bind(("127.0.0.1", 0))
        url = f"http://localhost:{free.getsockname()[1]}"  # of which a host may have two addresses
        async with OpenAiClient(url=url) as client:
            with pytest.raises(PeerLost, match=f"^nothing answers at {url}; `alignedserve serve` starts a server$"):
                await client.model_name()
