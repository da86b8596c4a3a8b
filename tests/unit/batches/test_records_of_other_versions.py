"""Records that another version has stored: an upgrade reads them all, and so does a step back.

`STORED` is as a version wrote it that people have. A new version adds members with defaults, and changes no line here.
What an older one must not pass over, as when lines may start, needs another RECORDS_VERSION, at which it refuses them.
"""

import pytest

from alignedserve.batches.eta import ThroughputEstimate
from alignedserve.batches.records import (
    BatchRecord,
    BatchStatus,
    BatchTotals,
    Counts,
    FileRecord,
    Progress,
    ResultKind,
    ResultView,
    Risk,
    StoredRecord,
    decode,
    encode,
)
from alignedserve.batches.repository import BatchRepository, BatchSnapshot, StorageUsage, StoredThroughputs
from alignedserve.batches.responses.response_repository import EventRange, StoredConversation, StoredResponse
from alignedserve.messages.state import SetValue
from tests.support.batch_samples import BATCH, INPUT, OUTPUT, batch_record, file_record
from tests.support.memory_records import MemoryRecords

FILE = (
    b'{"file_id":"file-111111111111111111111111","owner":"anyone","name":"in.jsonl","purpose":"batch",'
    b'"num_bytes":1000,"num_lines":10,"created_s":1.0,"expires_s":2592001.0,"digest":"9b24","num_uses":1}'
)
BATCH_WITH_HOURS = (
    b'{"batch_id":"batch_000000000000000000000000","owner":"anyone","endpoint":"/v1/chat/completions",'
    b'"input_file_id":"file-111111111111111111111111","output_file_id":"file-222222222222222222222222",'
    b'"error_file_id":"file-333333333333333333333333","completion_window":"24h","created_s":1.0,"expires_s":86401.0,'
    b'"output_lifetime_s":null,"input_bytes":1000,"input_lines":10,"fingerprint":"","status":"in_progress",'
    b'"model":"pocket","num_lines":10,"in_progress_s":2.0,"not_before_s":3.0,"hours":"22:00-06:00 UTC","priority":-1,'
    b'"paused_s":4.0}'
)
PROGRESS = (
    b'{"counts":{"total":10,"completed":3},"usage":{"input_tokens":8,"output_tokens":9,"cached_tokens":1,'
    b'"compute_us":7},"num_validated":10,"log_bytes":500,"output_bytes":400,"quote":{"risk":"at_risk","finish_s":9.0,'
    b'"is_measured":true,"quoted_s":5.0,"fitting_s":7.0},"paused":"no space left"}'
)
STORED: list[tuple[bytes, type[StoredRecord]]] = [
    (FILE, FileRecord),
    (
        b'{"file_id":"file-222222222222222222222222","owner":"anyone","name":"out.jsonl","purpose":"batch_output",'
        b'"num_bytes":1,"num_lines":1,"created_s":1.0,"view":{"batch_id":"batch_000000000000000000000000",'
        b'"kind":"output"}}',
        FileRecord,
    ),
    (BATCH_WITH_HOURS, BatchRecord),
    (PROGRESS, Progress),
    (b'{"completed":857,"failed":1,"input_tokens":6893,"output_tokens":85220,"compute_us":40371126}', BatchTotals),
    (
        b'{"by_model":{"pocket":{"tokens_per_s":1456.2,"is_measured":true,"output_len":98.3,"bytes_per_token":9.6}}}',
        StoredThroughputs,
    ),
    (b'{"num_files":6,"num_bytes":171154}', StorageUsage),
    (
        b'{"conversation_id":"conv_1","owner":"anyone","created_s":1.0,"metadata":{"a":"b"},"items":[{"id":"msg_1"}],'
        b'"pending":["resp_1"]}',
        StoredConversation,
    ),
    (
        b'{"response_id":"resp_1","owner":"anyone","created_s":1.0,"expires_s":9.0,"response":{"id":"resp_1"},'
        b'"items":[],"ancestors":["resp_0"],"context_bytes":7,"batch_id":"batch_000000000000000000000000",'
        b'"conversation_id":"conv_1"}',
        StoredResponse,
    ),
    (b'{"end":3,"first":1,"num_first_bytes":10}', EventRange),
]


@pytest.mark.parametrize(("raw", "kind"), STORED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_stored_record_is_read_whole_and_written_as_it_was(raw: bytes, kind: type[StoredRecord]) -> None:
    assert encode(decode(raw, kind)) == raw


def test_what_a_stored_record_says_is_understood() -> None:
    batch = batch_record(
        status=BatchStatus.IN_PROGRESS,
        model="pocket",
        num_lines=10,
        in_progress_s=2.0,
        not_before_s=3.0,
        hours="22:00-06:00 UTC",
        priority=-1,
        paused_s=4.0,
    )
    assert decode(BATCH_WITH_HOURS, BatchRecord) == batch
    progress = decode(PROGRESS, Progress)
    assert (progress.counts, progress.paused) == (Counts(total=10, completed=3), "no space left")
    assert progress.eta is not None
    assert (progress.eta.risk, progress.eta.estimated_s) == (Risk.AT_RISK, 5.0)
    assert decode(STORED[1][0], FileRecord).view == ResultView(batch_id=BATCH, kind=ResultKind.OUTPUT)
    assert decode(STORED[1][0], FileRecord).file_id == OUTPUT
    known = decode(STORED[5][0], StoredThroughputs).by_model
    assert known == {"pocket": ThroughputEstimate(1456.2, is_measured=True, output_len=98.3, bytes_per_token=9.6)}


async def test_a_file_that_a_newer_version_has_stored_may_be_of_a_batch() -> None:
    store, source = MemoryRecords(), file_record()
    repository = BatchRepository(store)
    assert await repository.add_file(source, fits=lambda _: True)
    newer = encode(source)[:-1] + b',"scanned_s":5.0}'
    await store.commit([SetValue(f"file/{INPUT}", newer)], unchanged={})
    found = await repository.file("anyone", INPUT, now=1.0)
    assert found is not None
    snapshot = BatchSnapshot(batch_record(), Progress())
    assert await repository.add_batch(snapshot, found, None, idempotency_key=None, key_lifetime_s=0.0)
    assert await repository.active_batches() == [snapshot]
    used = await repository.file("anyone", INPUT, now=1.0)
    assert used is not None
    assert used.num_uses == 1
    assert not await repository.add_batch(snapshot, found, None, idempotency_key=None, key_lifetime_s=0.0)
