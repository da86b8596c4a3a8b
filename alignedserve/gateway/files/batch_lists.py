"""Lists of batches, which go on where the last page ended even if what it ended with was deleted meanwhile."""

from alignedserve.batches.repository import BatchRepository, BatchSnapshot

_PIECE = 100  # batches read at a time


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
    place, page, cursor = (deleted.created_s, after), list[BatchSnapshot](), None
    while True:
        response = await repository.list_batches(owner, after=cursor, limit=_PIECE, newest_first=newest_first)
        if response is None:  # that one was deleted too
            page, cursor = [], None
            continue
        batches, has_more = response
        page += [
            batch for batch in batches if ((batch.record.created_s, batch.record.batch_id) < place) is newest_first
        ]
        if len(page) > limit or not has_more or not batches:
            return page[:limit], len(page) > limit
        cursor = batches[-1].record.batch_id
