"""Load of several tenants on a server: floods of streams, chats one by one, and the keys that tell them apart."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignedserve.keys.edit import change_keys
from alignedserve.keys.file import KeyRow, SecretRow
from alignedserve.keys.ring import digest_of


def write_keys(path: Path, weights: Mapping[str, float]) -> None:
    """Write a file of keys of these names and weights; the secret of each is its name."""
    rows = [
        KeyRow(name=name, secrets=(SecretRow(digest_of(name).hex()),), weight=weight)
        for name, weight in weights.items()
    ]
    change_keys(path, lambda _: rows)


class Tenant:
    """One client with a key of its own, and when its tokens came."""

    def __init__(self, port: int, name: str, model: str) -> None:
        """`name`: of its key, and the secret."""
        self.name = name
        self._port = port
        self._model = model
        self.num_answered = 0
        self.token_times_s: list[float] = []
        self.ttfts_s: list[float] = []  # of chats

    async def flood(
        self, num_open: int, until_s: float, *, answer_len: Sequence[int] = (30, 90), **fields: Any
    ) -> None:
        """Keep so many streams open, each followed by another when it ends; then cut all off."""

        async def stream(number: int) -> None:
            drawn = random.Random(f"{self.name} {number}")
            while True:
                prompt = {"prompt": f"spell otter {number}", "max_tokens": drawn.randint(*answer_len)}
                await self._answer("/v1/completions", {**prompt, "ignore_eos": True, **fields})

        streams = [asyncio.create_task(stream(number)) for number in range(num_open)]
        _, _ = await asyncio.wait(streams, timeout=until_s - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
        for task in streams:
            task.cancel()
        failed = [one for one in await asyncio.gather(*streams, return_exceptions=True) if isinstance(one, Exception)]
        if failed:
            raise failed[0]

    async def chat(self, until_s: float, *, rate: float = 1.0) -> None:
        """Send chats at their moments, a Poisson process, whatever the ones before them take."""
        drawn, tasks = random.Random(self.name), []
        next_s = time.perf_counter()
        while (next_s := next_s + drawn.expovariate(rate)) < until_s:
            await asyncio.sleep(max(next_s - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(self._chat()))
        await asyncio.gather(*tasks)

    async def _chat(self) -> None:
        messages = [{"role": "user", "content": "count from 1 to 12"}]
        self.ttfts_s.append(await self._answer("/v1/chat/completions", {"messages": messages, "max_tokens": 48}))

    async def _answer(self, path: str, fields: dict[str, Any]) -> float:
        """Stream an answer, and return the seconds to its first token."""
        began_s = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = json.dumps({"model": self._model, "stream": True, **fields}).encode()
        head = (
            *(f"POST {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json"),
            *(f"Authorization: Bearer {self.name}", f"Content-Length: {len(body)}"),
        )
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        first_s, is_whole, said = None, False, b""
        try:
            async for line in reader:
                is_whole |= line.startswith(b"data: [DONE]")
                said = line if line.startswith((b"data: {", b"HTTP/", b"{")) else said
                if line.startswith(b"data: {") and _has_token(line):
                    self.token_times_s.append(time.perf_counter())
                    first_s = first_s or time.perf_counter() - began_s
        finally:
            writer.close()
        if first_s is None or not is_whole:
            raise RuntimeError(f"{self.name}: no whole answer came, the last words were {said[:300]!r}")
        self.num_answered += 1
        return first_s


def _has_token(line: bytes) -> bool:
    """Return whether an event has a token; the first one of a chat has only a role, the last one only a reason."""
    choices = json.loads(line[len(b"data: ") :]).get("choices") or [{}]
    text = choices[0].get("text") or (choices[0].get("delta") or {}).get("content")
    return bool(text)


def windows(tenants: Sequence[Tenant], first_s: float, last_s: float, length_s: int = 10) -> list[Counter[str]]:
    """Return the tokens of each tenant in every window of so many seconds that begins with a whole second of these."""
    seconds: list[Counter[str]] = [Counter() for _ in range(int(last_s - first_s))]
    for tenant in tenants:
        for time_s in tenant.token_times_s:
            if 0 <= (second := int(time_s - first_s)) < len(seconds):
                seconds[second][tenant.name] += 1
    return [sum(seconds[begin : begin + length_s], Counter()) for begin in range(len(seconds) - length_s + 1)]
