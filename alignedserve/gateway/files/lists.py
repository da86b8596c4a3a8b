"""Lists of files and batches: a list goes on where its last page ended, even if that item was deleted meanwhile."""

from collections.abc import Mapping, Sequence

from alignedserve.batches.records import BatchKey, FileRecord, Progress
from alignedserve.batches.repository import BatchRepository, BatchSnapshot
from alignedserve.batches.results import result_bytes
from alignedserve.core.errors import InvalidRequest

_PIECE = 500  # files read at a time
_BATCHES_AT_ONCE = 100  # batches read at a time


async def list_files(
    repository: BatchRepository, owner: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
) -> tuple[list[FileRecord], bool]:
    """Return a page of files, and whether there are more. Raises InvalidRequest for an unknown cursor.

    `after` may have been deleted lately: SDKs ask by the last file of a page, and their user may delete what it lists.
    """
    page: list[FileRecord] = []
    piece = _PIECE if purpose is not None else min(limit, _PIECE)
    passed: list[str] = []  # cursors, of which the last ones may be deleted before the next piece is read
    position: tuple[float, str] | None = None  # of `after` in the list, where it is deleted
    while True:
        part = await repository.files(owner, after=after, limit=piece, newest_first=newest_first)
        if part is None and passed:
            after = passed.pop()
            continue
        if part is None and after is not None and position is None:
            deleted = await repository.deleted(owner, after)
            if deleted is not None:
                position, after, piece = (deleted.created_s, after), None, _PIECE
                continue
        if part is None:
            raise InvalidRequest("after is not the id of a file in this list.", param="after")
        page += [
            record
            for record in part.files
            if purpose in (None, record.purpose)
            and (position is None or ((record.created_s, record.file_id) < position) is newest_first)
        ]
        # A filtered page is filled up: SDKs take an empty page for the last one.
        is_filtered = purpose is not None or position is not None
        if len(page) > limit or not part.has_more or (not is_filtered and len(page) == limit):
            return page[:limit], len(page) > limit or part.has_more
        passed += part.file_ids
        after = passed.pop()


async def sizes_of(repository: BatchRepository, files: Sequence[FileRecord]) -> list[int]:
    """Return the sizes of these files; a result file grows while its batch runs."""
    sizes: list[int] = []
    for first in range(0, len(files), _PIECE):
        piece = files[first : first + _PIECE]
        batch_ids = dict.fromkeys(file.view.batch_id for file in piece if file.view is not None)
        progress = {batch.record.batch_id: batch.progress for batch in await repository.batches(list(batch_ids))}
        sizes += [_size_of(file, progress) for file in piece]
    return sizes


def _size_of(file: FileRecord, batches: Mapping[BatchKey, Progress]) -> int:
    if file.view is None or file.view.batch_id not in batches:
        return file.num_bytes
    return result_bytes(batches[file.view.batch_id], file.view.kind)


async def list_batches(
    repository: BatchRepository, owner: str, *, after: str | None, limit: int, newest_first: bool
) -> tuple[list[BatchSnapshot], bool] | None:
    """Return a page of an owner's batches, and whether there are more. None: `after` is none of them.

    `after` may have been deleted lately: SDKs ask by the last batch of a page, and their user may delete what it lists.
    """
    response = await repository.list_batches(owner, after=after, limit=limit, newest_first=newest_first)
    deleted = await repository.deleted(owner, after) if response is None and after is not None else None
    if deleted is None:
        return response
    position, page, cursor = (deleted.created_s, after), list[BatchSnapshot](), None
    while True:
        response = await repository.list_batches(owner, after=cursor, limit=_BATCHES_AT_ONCE, newest_first=newest_first)
        if response is None:  # that one was deleted too
            page, cursor = [], None
            continue
        batches, has_more = response
        page += [
            batch for batch in batches if ((batch.record.created_s, batch.record.batch_id) < position) is newest_first
        ]
        if len(page) > limit or not has_more or not batches:
            return page[:limit], len(page) > limit
        cursor = batches[-1].record.batch_id
