"""Turns planned requests into calls of a server's completion interface, and outcomes into records."""

import base64
import random
import secrets
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from alignedserve.client.openai_client import CompletionApi, CompletionCall, CompletionOutcome
from alignedserve.core import metrics
from alignedserve.core.request import Slo
from lab.certification.protocol import PlannedRequest
from lab.certification.records import StreamRecord
from lab.loadgen.load_plan import TrafficClass
from lab.loadgen.prompts import slo_headers, words

_CELLS = 16  # of colour, along an edge
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture_url(edge: int, rng: random.Random) -> str:
    """Return the data URL of a PNG of `edge` x `edge` pixels, whose colours `rng` draws."""
    return f"data:image/png;base64,{base64.b64encode(_png(edge, rng)).decode()}"


def _png(edge: int, rng: random.Random) -> bytes:
    places = [pixel * _CELLS // edge for pixel in range(edge)]
    colours = [[rng.randbytes(3) for _ in range(_CELLS)] for _ in range(_CELLS)]
    rows = [b"\0" + b"".join([line[index] for index in places]) for line in colours]  # 0: no filter
    pixels = zlib.compress(b"".join([rows[index] for index in places]), 1)
    header = struct.pack(">IIBBBBB", edge, edge, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return _SIGNATURE + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


_MAX_GAPS = 200_000  # in the sample of a phase


@dataclass(frozen=True, slots=True)
class CallMaker:
    """Makes bodies and calls for one model. Equal texts make equal prompts, but not those of another certificate, which
    the server's prefix cache may remember."""

    model: str
    api: CompletionApi
    salt: int = field(default_factory=partial(secrets.randbits, 32))
    tokens_per_word: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of every body

    def body(self, request: PlannedRequest) -> dict[str, Any]:
        """Return a body, greedy and of a fixed length where the server can do that."""
        rng = random.Random(f"{self.salt}/{request.text}")  # noqa: S311 - a workload, not a secret
        prompt = words(round(request.prompt_len / self.tokens_per_word), rng)
        body = {"model": self.model, "temperature": 0, "max_tokens": request.output_len, **self.extra}
        if self.api is CompletionApi.CHAT:
            content: Any = prompt
            if request.picture_edge is not None:
                shown = {"type": "image_url", "image_url": {"url": picture_url(request.picture_edge, rng)}}
                content = [shown, {"type": "text", "text": prompt}]
            return {**body, "messages": [{"role": "user", "content": content}]}
        return {**body, "prompt": prompt}

    def call(self, request: PlannedRequest, slo: Slo, more: Mapping[str, Any] | None = None) -> CompletionCall:
        headers = slo_headers(TrafficClass("chat", slo))
        return CompletionCall(self.api, {**self.body(request), **(more or {})}, headers)


def record_of(outcome: CompletionOutcome, began_s: float, *, has_picture: bool = False) -> StreamRecord:
    gaps_s = metrics.tbt_s(outcome.token_times_s)
    failure = None if outcome.failure is None else outcome.failure.label
    if failure is None and outcome.finish_reason is None:
        failure = "given up"  # the phase ended first
    return StreamRecord(
        sent_s=outcome.sent_s - began_s,
        ended_s=outcome.ended_s - began_s,
        num_tokens=outcome.num_tokens,
        ttft_s=metrics.ttft_s(outcome.sent_s, outcome.token_times_s),
        tpot_s=metrics.tpot_s(outcome.token_times_s, outcome.num_tokens),
        longest_gap_s=max(gaps_s, default=None),
        failure=failure,
        reason=None if outcome.failure is None else outcome.failure.reason,
        has_picture=has_picture,
    )


def gaps_of(outcomes: Iterable[CompletionOutcome]) -> tuple[float, ...]:
    gaps_s = [gap for outcome in outcomes for gap in metrics.tbt_s(outcome.token_times_s)]
    return tuple(gaps_s[:: len(gaps_s) // _MAX_GAPS + 1])
