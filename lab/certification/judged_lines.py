"""Judges the lines of a batch by its output and error files: answered, failed, lost, doubled, wrong."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lab.certification.protocol import PlannedBatch
from lab.certification.records import BatchRecord

_MAX_SHOWN = 5
_EXPIRED = "batch_expired"


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What came for one line."""

    custom_id: str
    text: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    failure: str | None = None  # its kind


def read_answer(line: bytes) -> LineAnswer | None:
    """Read a line of an output or error file; None when it is none."""
    try:
        record = msgspec.json.decode(line)
        custom_id = record["custom_id"]
        if not isinstance(custom_id, str):
            return None
        error, response = record.get("error"), record.get("response")
        if error is not None:
            return LineAnswer(custom_id, failure=str(error.get("code") or "error"))
        if response["status_code"] != 200:
            return LineAnswer(custom_id, failure=f"http {response['status_code']}")
        body = response["body"]
        return LineAnswer(
            custom_id,
            _text_of(body),
            int(body.get("usage", {}).get("prompt_tokens", 0)),
            int(body.get("usage", {}).get("completion_tokens", 0)),
        )
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError, ValueError):
        return None


def _text_of(body: Mapping[str, Any]) -> str:
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text if isinstance(text, str) else ""


@dataclass(slots=True)
class LineJudge:
    """Takes the answers of one batch, in any order, and says what became of its lines."""

    batch: PlannedBatch
    expected: Mapping[int, str]  # answers of probes, alone
    _seen: Counter[str] = field(default_factory=Counter)
    _failures: Counter[str] = field(default_factory=Counter)
    _wrong: list[str] = field(default_factory=list)
    _num_tokens: list[int] = field(default_factory=lambda: [0, 0])
    _probes: dict[str, int] = field(init=False)
    _ids: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._ids = frozenset(line.custom_id for line in self.batch.lines)
        self._probes = {line.custom_id: line.probe for line in self.batch.lines if line.probe is not None}

    def take(self, answer: LineAnswer | None) -> None:
        """Take one; None: a record that cannot be read."""
        if answer is None:
            self._wrong.append("a record that is no answer to a line")
            return
        custom_id = answer.custom_id
        if custom_id not in self._ids:
            self._wrong.append(f"a record of {custom_id[:80]!r}, which no line is")
            return
        self._seen[custom_id] += 1
        if self._seen[custom_id] > 1:
            return
        if answer.failure is not None:
            self._failures[answer.failure] += 1
            return
        self._num_tokens[0] += answer.num_prompt_tokens
        self._num_tokens[1] += answer.num_output_tokens
        expected = self.expected.get(self._probes.get(custom_id, -1))
        if expected is not None and answer.text != expected:
            self._wrong.append(f"{custom_id}: {_shortened(answer.text)}, alone {_shortened(expected)}")

    def record(self, status: str, began_s: float, ended_s: float | None) -> BatchRecord:
        """Return what became of the batch."""
        failures = dict(self._failures.most_common())
        num_expired = failures.pop(_EXPIRED, 0)
        return BatchRecord(
            name=self.batch.name,
            window_s=self.batch.window_s,
            num_lines=len(self.batch.lines),
            began_s=began_s,
            ended_s=ended_s,
            status=status,
            num_answered=len(self._seen) - sum(self._failures.values()),
            num_lost=len(self.batch.lines) - len(self._seen),
            num_doubled=sum(self._seen.values()) - len(self._seen),
            num_wrong=len(self._wrong),
            num_expired=num_expired,
            num_prompt_tokens=self._num_tokens[0],
            num_output_tokens=self._num_tokens[1],
            failures=failures,
            wrong=tuple(self._wrong[:_MAX_SHOWN]),
        )


def _shortened(text: str | None) -> str:
    return repr(text if text is None or len(text) <= 60 else text[:60] + "…")
