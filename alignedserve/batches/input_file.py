"""Reading an input file: once to validate it, and again whenever a batch is taken up."""

from collections.abc import AsyncIterator

from alignedserve.batches.input_lines import Inspection, LineSplitter, LineTooLong, too_long
from alignedserve.batches.interfaces import BlobStore
from alignedserve.batches.records import BatchRecord, LineProblem
from alignedserve.core.errors import StorageDamaged


async def read_input(
    blobs: BlobStore, record: BatchRecord, inspection: Inspection, max_line_bytes: int
) -> AsyncIterator[int]:
    """Show every line to the inspection; yields the lines so far after each chunk, so that others go on meanwhile.

    A batch that was validated before is only indexed: what is served may have changed since.
    """
    splitter = LineSplitter(max_line_bytes)
    take = inspection.index.add if record.num_lines else inspection.look_at
    try:
        async for chunk in blobs.chunks(record.input_file_id):
            for line in splitter.push(chunk):
                take(line)
            yield len(inspection.index)
            if inspection.is_over:
                return
        for line in splitter.end():
            take(line)
    except LineTooLong as error:
        inspection.problems.append(too_long(error.number, max_line_bytes))
    except StorageDamaged as error:
        inspection.problems.append(LineProblem(code="file_unreadable", message=str(error)))
