"""Files that nobody needs any more: expired, deleted, or left behind by an upload that never ended."""

import logging
from typing import Protocol

from alignedserve.batches.interfaces import BlobStore
from alignedserve.batches.log.disk_log import DiskLogs
from alignedserve.batches.records import BatchRecord, FileRecord, ResultKind
from alignedserve.batches.repository import BatchRepository
from alignedserve.core.errors import StorageError

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 1000
_ABANDONED_S = 3600.0  # after that nobody is about to write a content's record


class Stores(Protocol):
    """Where files are."""

    @property
    def book(self) -> BatchRepository:
        """What is known of them."""

    @property
    def blobs(self) -> BlobStore:
        """Contents of uploads."""

    @property
    def logs(self) -> DiskLogs:
        """Results."""


async def forget_file(stores: Stores, record: FileRecord) -> bool:
    """Remove a file and what only it needs. False: it has changed since it was read. The record goes first: what is
    left behind by a crash in between is found by `tidy`, and never a record without its content."""
    if not await stores.book.remove_file(record):
        return False
    if record.view is None:
        await stores.blobs.remove(record.file_id)
        return True
    sight = await stores.book.batch(record.view.batch_id)
    if sight is None or not await _has_results(stores.book, sight.record):
        stores.logs.remove(record.view.batch_id)
    return True


def uses(record: BatchRecord, file: FileRecord) -> bool:
    """Whether a batch that is not over needs this file."""
    return file.file_id in (record.input_file_id, record.output_file_id, record.error_file_id)


async def tidy(stores: Stores, now: float, *, batch_lifetime_s: float) -> None:
    """Remove files that have expired and are not in use, batches whose results are gone, and contents that nobody
    knows. Raises StorageError."""
    await _tidy_files(stores, now)
    await _tidy_batches(stores, now - batch_lifetime_s)
    await _tidy_contents(stores)


async def _tidy_files(stores: Stores, now: float) -> None:
    expired = [file for file in await stores.book.expiring_files(_MAX_AT_ONCE) if _is_expired(file, now)]
    if not expired:
        return
    active = [sight.record for sight in await stores.book.active_batches()]
    for file in expired:
        if any(uses(record, file) for record in active):
            continue
        try:
            await forget_file(stores, file)
            logger.info("%s has expired", file.file_id)
        except StorageError:
            logger.exception("%s cannot be removed", file.file_id)


async def _tidy_batches(stores: Stores, before_s: float) -> None:
    """Those that were over by then, and have no result file any more."""
    for sight in await stores.book.oldest_over(_MAX_AT_ONCE):
        record = sight.record
        if record.over_s < before_s and not await _has_results(stores.book, record):
            stores.logs.remove(record.batch_id)
            await stores.book.remove_batch(record)


async def _tidy_contents(stores: Stores) -> None:
    """A gateway that dies between a file's content and its record leaves the content, one that dies earlier a part."""
    if num_abandoned := await stores.blobs.remove_abandoned(_ABANDONED_S):
        logger.info("%d uploads that never ended are removed", num_abandoned)
    old = await stores.blobs.committed_before(_ABANDONED_S)
    for first in range(0, len(old), _MAX_AT_ONCE):
        for file_id in await stores.book.unknown_files(old[first : first + _MAX_AT_ONCE]):
            await stores.blobs.remove(file_id)
            logger.info("%s has no record and is removed", file_id)


def _is_expired(file: FileRecord, now: float) -> bool:
    return file.expires_s is not None and now >= file.expires_s


async def _has_results(book: BatchRepository, record: BatchRecord) -> bool:
    kinds = list(ResultKind)
    return len(await book.unknown_files([record.result_file(kind) for kind in kinds])) < len(kinds)
