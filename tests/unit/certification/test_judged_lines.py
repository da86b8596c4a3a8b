"""Lines of a batch, judged by its files."""

import json
from dataclasses import replace

from lab.certification.judged_lines import LineAnswer, LineJudge, read_answer
from lab.certification.protocol import Phase
from lab.certification.records import BatchRecord
from tests.unit.certification.samples import PROTOCOL

BATCH = PROTOCOL.batches(Phase.BESIDE)[0]
PROBE = next(line.custom_id for line in BATCH.lines if line.probe is not None)
ANSWERS = [LineAnswer(line.custom_id, "right", 10, 5) for line in BATCH.lines]


def _judged(answers: list[LineAnswer | None]) -> BatchRecord:
    judge = LineJudge(BATCH, dict.fromkeys(range(8), "right"))
    for answer in answers:
        judge.take(answer)
    return judge.record("completed", 0.0, 10.0)


def test_every_line_answered_once() -> None:
    record = _judged([*ANSWERS])
    assert (record.num_answered, record.num_lost, record.num_doubled, record.num_wrong) == (20, 0, 0, 0)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (200, 100)
    assert record.has_held_window


def test_lost_doubled_and_foreign_lines() -> None:
    record = _judged([*ANSWERS[1:], ANSWERS[1], LineAnswer("another", "right"), None])
    assert (record.num_answered, record.num_lost, record.num_doubled, record.num_wrong) == (19, 1, 1, 2)


def test_a_probe_with_another_answer_than_alone_is_wrong() -> None:
    record = _judged([replace(one, text="left") if one.custom_id == PROBE else one for one in ANSWERS])
    assert record.num_wrong == 1
    assert record.wrong == (f"{PROBE}: 'left', alone 'right'",)


def test_failed_and_expired_lines_are_not_lost() -> None:
    failed, expired = ANSWERS[0].custom_id, ANSWERS[1].custom_id
    record = _judged(
        [LineAnswer(failed, failure="http 504"), LineAnswer(expired, failure="batch_expired"), *ANSWERS[2:]]
    )
    assert (record.num_answered, record.num_lost, record.num_expired) == (18, 0, 1)
    assert record.failures == {"http 504": 1}
    assert not record.has_held_window


def test_records_are_read() -> None:
    body = {"choices": [{"message": {"content": "yes"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    answered = {"custom_id": "1", "response": {"status_code": 200, "body": body}, "error": None}
    refused = {"custom_id": "2", "response": {"status_code": 400, "body": {}}, "error": None}
    expired = {"custom_id": "3", "response": None, "error": {"code": "batch_expired", "message": "x"}}
    read = [read_answer(json.dumps(record).encode()) for record in (answered, refused, expired)]
    assert read == [
        LineAnswer("1", "yes", 3, 1),
        LineAnswer("2", failure="http 400"),
        LineAnswer("3", failure="batch_expired"),
    ]
    assert [read_answer(line) for line in (b"not json", b"[]", b'{"custom_id": 3}', b"{}")] == [None] * 4
