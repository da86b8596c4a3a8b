"""The load on a site during faults: bursts of streams and a batch, each answer known beforehand."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from benchmarks.chaos.judge import Ending, Outcome, ending_of
from benchmarks.chaos.rooms import Rooms
from benchmarks.chaos.seen import ask
from benchmarks.measuring.batch_client import BatchHttpClient

_ENDPOINT = "/v1/completions"
_NUM_QUESTIONS = 8
_NUM_LINES = 8
_ANSWER_S = 45.0  # by then a stream has ended, with an error or without
_BATCH_S = 60.0


class Question(NamedTuple):
    """A request with one right answer."""

    prompt: tuple[int, ...]
    max_tokens: int

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def questions(count: int = _NUM_QUESTIONS, seed: int = 0) -> tuple[Question, ...]:
    rng = random.Random(f"questions/{seed}")
    return tuple(
        Question(tuple(rng.randrange(10, 500) for _ in range(rng.randrange(3, 160))), rng.randrange(16, 49))
        for _ in range(count)
    )


def undisturbed(site: Rooms, asked: Sequence[Question]) -> dict[Question, str]:
    """Return every answer as it is when nothing is hurt."""
    answers = {}
    for question in asked:
        status, text = ask(site.url, _ENDPOINT, question.body(site.model), timeout_s=60.0)
        assert status == 200, f"no undisturbed answer: {status} {text}"
        answers[question] = str(json.loads(text)["choices"][0]["text"])
    return answers


@dataclass(slots=True)
class Stream:
    """One streamed answer."""

    question: Question
    client_id: str
    sent_s: float = 0.0  # monotonic
    status: int = 0
    text: str = ""
    num_events: int = 0
    is_done: bool = False
    error: str | None = None  # JSON: of an event; else of the connection


async def ask_stream(client: httpx.AsyncClient, stream: Stream, model: str) -> None:
    headers = {"x-request-id": stream.client_id}
    stream.sent_s = time.monotonic()
    try:
        async with client.stream(
            "POST", _ENDPOINT, json=stream.question.body(model) | {"stream": True}, headers=headers
        ) as response:
            stream.status = response.status_code
            if response.status_code != 200:
                stream.error = (await response.aread()).decode()
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    _read(line.removeprefix("data: "), stream)
    except httpx.HTTPError as error:
        stream.error = repr(error)


def _read(event: str, stream: Stream) -> None:
    if event == "[DONE]":
        stream.is_done = True
        return
    content = json.loads(event)
    if "error" in content:
        stream.error = json.dumps(content)
        return
    stream.num_events += 1
    stream.text += "".join(choice["text"] for choice in content["choices"])


class Load:
    """Streams of one schedule, on one event loop. Every answer is judged at the end."""

    def __init__(self, site: Rooms, answers: dict[Question, str], label: str) -> None:
        self.streams: list[Stream] = []
        self._site = site
        self._answers = answers
        self._label = label
        self._tasks: list[asyncio.Task[None]] = []
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=site.url, timeout=_ANSWER_S, limits=limits)

    def burst(self, count: int = 4) -> list[Stream]:
        asked = list(self._answers)
        began = len(self.streams)
        for number in range(began, began + count):
            stream = Stream(asked[number % len(asked)], f"{self._label}-{number}")
            self.streams.append(stream)
            self._tasks.append(asyncio.create_task(ask_stream(self._client, stream, self._site.model)))
        return self.streams[began:]

    async def settle(self, timeout_s: float = _ANSWER_S) -> None:
        """Wait until every stream has ended, or for so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def judge(self, outcome: Outcome) -> None:
        await self.settle()
        for stream, task in zip(self.streams, self._tasks, strict=True):
            if not task.done():
                task.cancel()
                outcome.add(Ending.HUNG, f"{stream.client_id}: {stream.num_events} events")
                continue
            expected = self._answers[stream.question]
            ending = ending_of(stream.status, stream.text, expected, is_done=stream.is_done, error=stream.error)
            told = f"{stream.client_id}: {stream.status} {stream.error} {stream.text!r} for {expected!r}"
            outcome.add(ending, "" if ending is Ending.EXACT else told)
        await self._client.aclose()

    def phases_at(self, at_s: float) -> list[str]:
        found: Counter[str] = Counter()
        for stream in self.streams:
            for name, start_s, end_s in course_of(self._site, stream):
                if start_s <= at_s < end_s:
                    found[name] += 1
        return sorted(found)


def course_of(site: Rooms, stream: Stream) -> list[tuple[str, float, float]]:
    """Return the phases of a request with their monotonic times; empty where no gateway knows of it."""
    status, text = ask(site.url, f"/v1/alignedserve/requests/{stream.client_id}")
    if status != 200:
        return []
    course = []
    for choice in json.loads(text)["choices"]:
        for phase in choice["phases"]:
            start_s = stream.sent_s + phase["start_ms"] / 1e3
            course.append((str(phase["name"]), start_s, start_s + phase["duration_ms"] / 1e3))
    return course


class BatchLoad:
    """One batch, and its judgement."""

    def __init__(self, site: Rooms, answers: dict[Question, str]) -> None:
        self._client = BatchHttpClient(site.url, _BATCH_S)
        self._model = site.model
        self._lines = {f"line-{number}": question for number, question in enumerate(list(answers)[:_NUM_LINES])}
        self._answers = answers

    def run(self, outcome: Outcome) -> None:
        lines = [
            {"custom_id": custom_id, "method": "POST", "url": _ENDPOINT, "body": question.body(self._model)}
            for custom_id, question in self._lines.items()
        ]
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        try:
            batch = self._client.wait(self._client.submit(content, _ENDPOINT))
            outcome.batch_status = str(batch["status"])
            output = self._client.lines(batch.get("output_file_id"))
            errors = self._client.lines(batch.get("error_file_id"))
        except (OSError, TimeoutError) as error:
            outcome.batch_status = f"did not end: {error}"
            return
        self._judge(output, errors, outcome)

    def _judge(self, output: list[dict[str, Any]], errors: list[dict[str, Any]], outcome: Outcome) -> None:
        seen = Counter(line["custom_id"] for line in (*output, *errors))
        outcome.lines_lost = sum(custom_id not in seen for custom_id in self._lines)
        outcome.lines_doubled = sum(count - 1 for count in seen.values())
        wrong = [line for line in output if self._text(line) != self._answers[self._lines[line["custom_id"]]]]
        outcome.lines_wrong = len(wrong) + len(errors)
        outcome.messages += [json.dumps(line)[:300] for line in (*wrong, *errors)]

    @staticmethod
    def _text(line: dict[str, Any]) -> str:
        return str(line["response"]["body"]["choices"][0]["text"])
