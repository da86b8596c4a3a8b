"""Removal of files and batches that are no longer needed: expired, deleted, or left behind by an unfinished upload."""

import logging

from alignedserve.batches.location import BatchStores, DriverStores
from alignedserve.batches.records import BatchRecord, FileRecord, ResultKind, is_client
from alignedserve.batches.repository import BatchRepository
from alignedserve.core.errors import StorageError

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 1000
_ABANDONED_S = 3600.0  # an older blob without a record will not get one any more


async def delete_file(stores: BatchStores, record: FileRecord) -> bool:
    """Remove a file and what only it needs. False: it has changed since it was read. The record is removed first: after
    a crash `collect_garbage` finds contents without a record, and there is never a record without its content."""
    if not await stores.repository.remove_file(record):
        return False
    if record.view is None:
        await stores.blobs.remove(record.file_id)
        return True
    snapshot = await stores.repository.batch(record.view.batch_id)
    if snapshot is None or not await _has_results(stores.repository, snapshot.record):
        await stores.logs.remove(record.view.batch_id)
    return True


def is_used_by(file: FileRecord, record: BatchRecord) -> bool:
    """Return True if the batch reads or writes this file while it is active."""
    return file.file_id in (record.input_file_id, record.output_file_id, record.error_file_id)


async def forget_input(stores: DriverStores, record: BatchRecord, now: float) -> None:
    """Remove the input file of a batch that is over and was made by another API than Files: no client knows of it. What
    is left behind expires. Raises StorageError."""
    file = None if is_client(record.owner) else await stores.repository.file(record.owner, record.input_file_id, now)
    if file is not None:
        await delete_file(stores, file)


async def collect_garbage(
    stores: DriverStores, now: float, *, batch_lifetime_s: float, clock_gained_s: float = 0.0
) -> None:
    """Remove expired unused files, old batches without results, and contents without a record. Raises StorageError.

    `clock_gained_s`: by which ages may be too high, as the clock was set; nothing is removed sooner for it."""
    await _remove_expired_files(stores, now - clock_gained_s)
    before_s = now - clock_gained_s - batch_lifetime_s
    for snapshot in await stores.repository.oldest_over(_MAX_AT_ONCE):
        record = snapshot.record
        if record.over_s < before_s and not await _has_results(stores.repository, record):
            await stores.logs.remove(record.batch_id)
            await stores.repository.remove_batch(record)
    age_s = _ABANDONED_S + clock_gained_s
    if num_abandoned := await stores.blobs.remove_abandoned(age_s):
        logger.info("%d unfinished uploads are removed", num_abandoned)
    old = await stores.blobs.committed_before(age_s)
    for first in range(0, len(old), _MAX_AT_ONCE):
        for file_id in await stores.repository.unknown_files(old[first : first + _MAX_AT_ONCE]):
            await stores.blobs.remove(file_id)
            logger.info("%s has no record and is removed", file_id)


async def _remove_expired_files(stores: DriverStores, now: float) -> None:
    expired = [file for file in await stores.repository.expiring_files(_MAX_AT_ONCE) if file.is_expired(now)]
    if not expired:
        return
    active = [snapshot.record for snapshot in await stores.repository.active_batches()]
    for file in expired:
        if any(is_used_by(file, record) for record in active):
            continue
        try:
            await delete_file(stores, file)
            logger.info("%s has expired", file.file_id)
        except StorageError:
            logger.exception("%s cannot be removed", file.file_id)


async def _has_results(repository: BatchRepository, record: BatchRecord) -> bool:
    kinds = list(ResultKind)
    return len(await repository.unknown_files([record.result_file(kind) for kind in kinds])) < len(kinds)
