"""The log of results: what is in it after any kind of end."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from alignedserve.batches.log import disk_log
from alignedserve.batches.log.disk_log import (
    DiskLogs,
    LineOutcome,
    LogTotals,
    ResultRecord,
    decode_record,
    encode_record,
)
from alignedserve.batches.records import BatchKey, ResultKind, Usage
from alignedserve.batches.results import ResultWriter
from alignedserve.core.errors import StorageDamaged, StorageError
from tests.support.batch_samples import BATCH
from tests.support.marks import each

RECORDS = [
    ResultRecord(2, LineOutcome.COMPLETED, b'{"custom_id":"c"}', 5, 7),
    ResultRecord(0, LineOutcome.FAILED, b'{"custom_id":"a"}'),
    ResultRecord(1, LineOutcome.EXPIRED, b'{"custom_id":"b"}'),
]


class FullDisk:
    """A log whose disk is full until room is made."""

    num_bytes = 0
    has_room = False

    def append(self, records: Sequence[ResultRecord]) -> None:
        if not self.has_room:
            raise StorageError("no space left on device")


def logs(folder: Path) -> DiskLogs:
    return DiskLogs(folder / "results")


def written(folder: Path, records: list[ResultRecord] = RECORDS) -> Path:
    log, _ = logs(folder).open(BATCH, 3)
    log.append(records)
    log.close()
    return folder / "results" / f"{BATCH}.log"


def test_a_record_comes_back_as_it_went() -> None:
    for record in RECORDS:
        assert decode_record(encode_record(record)) == record


@each("place", range(len(encode_record(RECORDS[0]))))
def test_no_changed_byte_goes_unseen(place: int) -> None:
    raw = bytearray(encode_record(RECORDS[0]))
    raw[place] ^= 1
    assert decode_record(bytes(raw)) is None


def test_what_was_computed_for_a_line_is_in_the_log() -> None:
    records = [ResultRecord(number, LineOutcome.COMPLETED, b"{}", 50, 7, 0, 1_234_567 * number) for number in range(3)]
    totals = LogTotals()
    for record in records:
        read = decode_record(encode_record(record))
        assert read == record
        totals.add(read)
    assert totals.usage().compute_us == 3 * 1_234_567


def test_cached_tokens_are_in_the_log_and_logs_without_them_are_read() -> None:
    record = ResultRecord(2, LineOutcome.COMPLETED, b"{}", 50, 7, 48)
    assert b" 50/48 7 " in encode_record(record)
    assert decode_record(encode_record(record)) == record
    totals = LogTotals()
    for one in (record, record._replace(cached_tokens=0)):
        totals.add(one)
    assert totals.usage() == Usage(input_tokens=100, output_tokens=14, cached_tokens=48)
    assert b" 50 7 " in encode_record(record._replace(cached_tokens=0))


def test_what_is_reopened_knows_what_is_done(tmp_path: Path) -> None:
    written(tmp_path)
    log, recovered = logs(tmp_path).open(BATCH, 3)
    counts = recovered.totals.counts(3)
    assert (recovered.settled, recovered.num_dropped) == ([2, 0, 1], 0)
    assert (counts.completed, counts.failed, counts.expired, counts.num_ended) == (1, 1, 1, 3)
    assert recovered.totals.usage().input_tokens == 5
    assert recovered.totals.num_bytes == {ResultKind.OUTPUT: 18, ResultKind.ERROR: 36}
    log.close()


def test_whatever_was_being_written_is_cut_off(tmp_path: Path) -> None:
    whole = written(tmp_path).read_bytes()
    last = len(encode_record(RECORDS[-1]))
    for missing in range(1, last + 1):
        (tmp_path / "results" / f"{BATCH}.log").write_bytes(whole[:-missing])
        log, recovered = logs(tmp_path).open(BATCH, 3)
        assert (recovered.settled, recovered.num_dropped) == ([2, 0], 0)
        log.append([RECORDS[-1]])
        log.close()
        assert (tmp_path / "results" / f"{BATCH}.log").read_bytes() == whole


def test_a_log_cut_off_within_its_head_begins_anew(tmp_path: Path) -> None:
    path = written(tmp_path, [])
    whole = path.read_bytes()
    path.write_bytes(whole[:10])
    log, recovered = logs(tmp_path).open(BATCH, 3)
    log.close()
    assert (recovered.settled, path.read_bytes()) == ([], whole)


def test_damage_in_the_middle_costs_only_what_is_damaged(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"q"'))
    log, recovered = logs(tmp_path).open(BATCH, 3)
    assert (recovered.settled, recovered.num_dropped) == ([2, 1], 1)
    log.append([RECORDS[1]])
    log.close()
    log, recovered = logs(tmp_path).open(BATCH, 3)
    log.close()
    assert (recovered.settled, recovered.num_dropped) == ([2, 1, 0], 0)


def test_a_second_record_of_a_line_is_dropped(tmp_path: Path) -> None:
    written(tmp_path, [RECORDS[0], RECORDS[0]._replace(payload=b"{}"), RECORDS[1]])
    log, recovered = logs(tmp_path).open(BATCH, 3)
    log.close()
    assert (recovered.settled, recovered.num_dropped) == ([2, 0], 1)
    assert b"".join(logs(tmp_path).lines(BATCH, ResultKind.OUTPUT, 1 << 30)) == RECORDS[0].payload + b"\n"


def test_there_is_one_writer(tmp_path: Path) -> None:
    log, _ = logs(tmp_path).open(BATCH, 3)
    with pytest.raises(StorageError, match="another process"):
        logs(tmp_path).open(BATCH, 3)
    log.close()
    logs(tmp_path).open(BATCH, 3)[0].close()


def test_a_log_of_another_batch_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    other = BatchKey("batch_" + "9" * 24)
    os.rename(path, path.with_name(f"{other}.log"))
    with pytest.raises(StorageDamaged):
        logs(tmp_path).open(other, 3)


def test_an_older_version_refuses_a_log_that_this_one_has_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, [RECORDS[0]])
    first, rest = path.read_bytes().split(b"\n", 1)
    head = decode_record(first + b"\n")
    assert head is not None
    older = head._replace(payload=head.payload.replace(b'"version":2', b'"version":1'))
    path.write_bytes(encode_record(older) + rest)
    for record in RECORDS[1:]:
        log, recovered = logs(tmp_path).open(BATCH, 3)
        assert recovered.num_dropped == 0
        log.append([record])
        log.close()
    log, recovered = logs(tmp_path).open(BATCH, 3)
    log.close()
    assert (recovered.settled, recovered.num_dropped) == ([2, 0, 1], 0)
    assert b"".join(logs(tmp_path).lines(BATCH, ResultKind.OUTPUT, 1 << 30)) == RECORDS[0].payload + b"\n"
    whole = path.read_bytes()
    monkeypatch.setattr(disk_log, "READABLE", (1,))
    with pytest.raises(StorageDamaged, match="is of another version of AlignedServe"):
        logs(tmp_path).open(BATCH, 3)
    assert path.read_bytes() == whole  # or it would run lines again whose results are there
    assert whole.count(b" h ") == 2


def test_readers_get_one_side_up_to_what_is_durable(tmp_path: Path) -> None:
    path = written(tmp_path)
    size = path.stat().st_size
    errors = b"".join(logs(tmp_path).lines(BATCH, ResultKind.ERROR, size)).splitlines()
    assert [json.loads(line)["custom_id"] for line in errors] == ["a", "b"]
    assert len(b"".join(logs(tmp_path).lines(BATCH, ResultKind.ERROR, size - 1)).splitlines()) == 1
    assert list(logs(tmp_path).lines(BatchKey("batch_" + "8" * 24), ResultKind.ERROR, 100)) == []


def test_what_a_failed_write_has_left_is_cut_off_once_that_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _ = logs(tmp_path).open(BATCH, 3)
    is_broken = True

    def failing(call: Callable[..., None]) -> Callable[..., None]:
        def made(*given: object) -> None:
            if is_broken:
                raise OSError(errno.EIO, "the disk does not answer")
            call(*given)

        return made

    for name in ("fdatasync", "ftruncate"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    for _ in range(2):
        with pytest.raises(StorageError):
            log.append(RECORDS[:2])
    is_broken = False
    log.append(RECORDS)
    shown = b"".join(logs(tmp_path).lines(BATCH, ResultKind.OUTPUT, log.num_bytes))
    log.close()
    reopened, recovered = logs(tmp_path).open(BATCH, 3)
    reopened.close()
    assert (recovered.num_dropped, reopened.num_bytes) == (0, log.num_bytes)
    assert shown.splitlines() == [record.payload for record in RECORDS if record.outcome is LineOutcome.COMPLETED]


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    log, _ = logs(tmp_path).open(BATCH, 3)
    log.close()
    log.close()
    with pytest.raises(StorageError):
        log.append(RECORDS)


def test_a_disk_that_fails_as_a_log_is_closed_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = logs(tmp_path).open(BATCH, 3)
    log.append(RECORDS)
    close = os.close

    def failing(file_descriptor: int) -> None:
        close(file_descriptor)
        raise OSError(errno.EIO, "what was written before was lost")

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", failing)
        log.close()
    reopened, recovered = logs(tmp_path).open(BATCH, 3)
    reopened.close()
    assert recovered.settled == [2, 0, 1]


def test_no_path_from_something_that_is_no_id(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        logs(tmp_path).open(BatchKey("../../etc/passwd"), 1)


# --- reading


def test_a_side_may_be_read_from_any_byte_on(tmp_path: Path) -> None:
    reader = logs(tmp_path)
    log, _ = reader.open(BATCH, 3000)
    ends = (LineOutcome.COMPLETED, LineOutcome.FAILED)
    log.append([ResultRecord(line, ends[line % 2], b"%04d" % line + b"x" * 2000) for line in range(3000)])
    log.close()
    for kind in ResultKind:
        whole = b"".join(reader.lines(BATCH, kind, log.num_bytes))
        for start in (len(whole) - 1, 1, len(whole) // 2, len(whole) - 2006, 0, len(whole), 1 << 40):
            assert b"".join(reader.lines(BATCH, kind, log.num_bytes, start)) == whole[start:]


def test_what_was_read_before_is_not_read_again(tmp_path: Path) -> None:
    """A client that follows a batch reads the end of its results again and again."""
    reader = logs(tmp_path)
    log, _ = reader.open(BATCH, 3000)
    log.append([ResultRecord(line, LineOutcome.COMPLETED, b"%04d" % line + b"x" * 2000) for line in range(3000)])
    whole = b"".join(reader.lines(BATCH, ResultKind.OUTPUT, log.num_bytes))
    damage(tmp_path / "results" / f"{BATCH}.log", place=4000)
    assert b"".join(reader.lines(BATCH, ResultKind.OUTPUT, log.num_bytes, len(whole) - 10)) == whole[-10:]
    log.close()


def test_damage_ends_a_download_with_an_error(tmp_path: Path) -> None:
    path = written(tmp_path)
    size = path.stat().st_size
    damage(path, place=path.read_bytes().index(b'"b"'))
    lines = logs(tmp_path).lines(BATCH, ResultKind.ERROR, size)
    assert next(lines) == RECORDS[1].payload + b"\n"
    with pytest.raises(StorageDamaged, match=r"cannot be read from byte 18 on"):
        next(lines)


def test_a_repaired_log_is_read_anew(tmp_path: Path) -> None:
    reader = logs(tmp_path)
    log, _ = reader.open(BATCH, 3000)
    log.append([ResultRecord(line, LineOutcome.COMPLETED, b"%04d" % line + b"x" * 2000) for line in range(3000)])
    log.close()
    assert len(b"".join(reader.lines(BATCH, ResultKind.OUTPUT, log.num_bytes))) == 3000 * 2005
    damage(tmp_path / "results" / f"{BATCH}.log", place=4000)
    log, recovered = reader.open(BATCH, 3000)
    log.close()
    assert recovered.num_dropped == 1
    tail = b"".join(reader.lines(BATCH, ResultKind.OUTPUT, log.num_bytes, 2998 * 2005))
    assert tail == b"2999" + b"x" * 2000 + b"\n"


def damage(path: Path, *, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# --- tries that came to nothing


def test_tries_are_known_and_are_no_results(tmp_path: Path) -> None:
    tried = ResultRecord(1, LineOutcome.RETRY, b"")
    path = written(tmp_path, [tried, RECORDS[0], tried, tried._replace(line=0)])
    log, recovered = logs(tmp_path).open(BATCH, 3)
    log.close()
    assert (recovered.settled, dict(recovered.num_attempts), recovered.num_dropped) == ([2], {1: 2, 0: 1}, 0)
    assert recovered.totals.counts(3).num_ended == 1
    for kind, whole in ((ResultKind.OUTPUT, RECORDS[0].payload + b"\n"), (ResultKind.ERROR, b"")):
        assert b"".join(logs(tmp_path).lines(BATCH, kind, path.stat().st_size)) == whole
    damage(path, place=path.read_bytes().index(b'"c"'))
    log, recovered = logs(tmp_path).open(BATCH, 3)
    log.append([RECORDS[2]])
    log.close()
    log, recovered = logs(tmp_path).open(BATCH, 3)
    log.close()
    assert (recovered.settled, dict(recovered.num_attempts), recovered.num_dropped) == ([1], {1: 2, 0: 1}, 0)


async def test_results_that_could_not_be_written_are_written_later_with_those_that_came_meanwhile() -> None:
    log = FullDisk()
    writer = ResultWriter(log, LogTotals())  # type: ignore[arg-type]
    writer.add(RECORDS[0], RECORDS[1])
    with pytest.raises(StorageError):
        await writer.write()
    writer.add(RECORDS[2])
    assert (writer.has_pending, writer.is_idle) == (True, False)
    log.has_room = True
    assert await writer.write() == RECORDS
    assert (writer.has_pending, writer.is_idle) == (False, True)
