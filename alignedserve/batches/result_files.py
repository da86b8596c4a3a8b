"""The two files of a batch's results: views of its log, which are there as soon as there is something in them."""

from alignedserve.batches.records import BatchRecord, FileRecord, Progress, ResultKind, ResultView

PURPOSE = "batch_output"


def num_bytes_of(progress: Progress, kind: ResultKind) -> int:
    """How much of it is there."""
    return progress.output_bytes if kind is ResultKind.OUTPUT else progress.error_bytes


def result_files(record: BatchRecord, progress: Progress, expires_s: float | None) -> list[FileRecord]:
    """Those that are there. They expire no sooner than their batch is over: `expires_s` is None until then."""
    counts = progress.counts
    num_lines = {ResultKind.OUTPUT: counts.completed, ResultKind.ERROR: counts.num_ended - counts.completed}
    created_s = record.in_progress_s or record.created_s
    return [
        FileRecord(
            file_id=record.result_file(kind),
            owner=record.owner,
            name=f"{record.batch_id}_{kind.value}.jsonl",
            purpose=PURPOSE,
            num_bytes=num_bytes_of(progress, kind),
            num_lines=num_lines[kind],
            created_s=created_s,
            expires_s=expires_s,
            view=ResultView(batch_id=record.batch_id, kind=kind),
        )
        for kind in ResultKind
        if num_bytes_of(progress, kind)
    ]
