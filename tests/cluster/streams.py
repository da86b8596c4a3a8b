"""Many streaming requests at once, and what came of each."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.cluster.serving import MODEL, Serving, token_prompts


@dataclass
class Stream:
    """One streamed answer."""

    status: int = 0
    text: str = ""
    num_events: int = 0
    longest_gap_s: float = 0.0
    is_done: bool = False  # "[DONE]" came
    error: str | None = None  # an error event, an error status, or a connection that broke
    retry_after: str | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)  # some text is here


async def stream_one(
    client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, into: Stream, **fields: object
) -> Stream:
    """Ask and read to the end. Never raises for what the server does."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    last_s = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True} | fields) as response:
            into.status = response.status_code
            into.retry_after = response.headers.get("retry-after")
            if response.status_code != 200:
                into.error = (await response.aread()).decode()
                return into
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                into.longest_gap_s = max(into.longest_gap_s, time.monotonic() - last_s)
                last_s = time.monotonic()
                _read_event(line.removeprefix("data: "), into)
    except httpx.HTTPError as error:
        into.error = repr(error)
    finally:
        into.started.set()
    return into


def _read_event(payload: str, into: Stream) -> None:
    if payload == "[DONE]":
        into.is_done = True
        return
    event = json.loads(payload)
    if "error" in event:
        into.error = payload
        return
    into.num_events += 1
    into.text += "".join(choice["text"] for choice in event["choices"])
    if into.num_events > 5:
        into.started.set()


def make_client(url: str) -> httpx.AsyncClient:
    """Return a client that waits and has room for every stream."""
    return httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=None))


async def stream_all(url: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    """Stream all prompts at once, undisturbed."""
    streams = [Stream() for _ in prompts]
    await streams_through(url, prompts, streams, max_tokens)
    return streams


def texts(cluster: Serving, max_tokens: int = 60) -> list[str]:
    """Return what a cluster answers to the same eight prompts at once, undisturbed."""
    streams = asyncio.run(stream_all(cluster.url, token_prompts(8), max_tokens))
    assert all(stream.is_done and stream.error is None for stream in streams), streams
    return [stream.text for stream in streams]


async def streams_through(
    url: str, prompts: Sequence[Sequence[int]], streams: Sequence[Stream], num_tokens: int
) -> None:
    """Ask all prompts at once, each into its stream, which can be looked at meanwhile."""
    async with make_client(url) as client:
        pairs = zip(prompts, streams, strict=True)
        await asyncio.gather(*(stream_one(client, prompt, num_tokens, into) for prompt, into in pairs))


async def all_started(streams: Sequence[Stream]) -> None:
    """Wait until each has some text."""
    for stream in streams:
        await stream.started.wait()


def check_whole(streams: Sequence[Stream], right: Sequence[Stream]) -> None:
    """Check that each has ended well and has the text of an undisturbed one."""
    assert [(one.error, one.is_done) for one in streams] == [(None, True)] * len(streams)
    assert [one.text for one in streams] == [one.text for one in right]
    print("longest pause", max(one.longest_gap_s for one in streams))
