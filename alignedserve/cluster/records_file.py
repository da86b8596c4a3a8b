"""The file of records when a cluster starts: checked; when there is none, begun with what an earlier version kept."""

import logging
import sqlite3
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from alignedserve.batches.stores.redis_dump import RedisDump, dump_files, read_dump
from alignedserve.batches.stores.sqlite_file import Member, Record, begin_file, check_file
from alignedserve.core.errors import ResourceError, StorageDamaged

logger = logging.getLogger(__name__)

_REDIS = "redis"  # folder of the Redis that earlier versions started


def prepare_records(path: Path, namespace: str) -> None:
    """Check the file of records, or begin it. Raises ResourceError, with whatever was there left as it is.

    `namespace`: what keys began with in the Redis of an earlier version, whose records are taken over once.
    """
    if path.exists():
        check_file(path)
        return
    try:
        files = dump_files(path.parent / _REDIS)
        if not files and has_contents(path.parent):
            raise ResourceError(
                f"{path} is missing, and the files and results beside it would be removed without it: put it back, "
                "name the Redis that has their records, or set batches.folder to another folder"
            )
        dump = read_dump(files)
        records, members = list(_records(dump, namespace)), list(_members(dump, namespace))
        begin_file(path, records, members)
    except StorageDamaged as error:
        raise ResourceError(
            f"{error}. An earlier version kept the records of files and batches there, and they cannot be taken over; "
            "docs/batches.md says what to do"
        ) from error
    except sqlite3.Error as error:
        raise ResourceError(f"{path} cannot be made: {error}") from error
    except OSError as error:
        raise ResourceError(f"{path} cannot be made: {error.strerror}") from error
    if files:
        logger.warning(
            "%d records of files and batches were taken over from %s into %s; the former are not used any more",
            len(records),
            path.parent / _REDIS,
            path.name,
        )
    others = len(dump.values) - sum(_is_of(key, namespace) for key in dump.values)
    if others:
        logger.warning("%d values of other namespaces than %s were left there", others, namespace)


def has_contents(folder: Path) -> bool:
    """Return whether the folder has contents of files, or results."""
    kept = (*(folder / "files").glob("file-*"), *(folder / "results").glob("*.log"))
    return any(not one.name.endswith(".partial") for one in kept)


def _is_of(key: bytes, namespace: str) -> bool:
    return key.startswith(f"{namespace}:".encode())


def _records(dump: RedisDump, namespace: str) -> Iterator[Record]:
    now = time.time()
    for key, (value, until_s) in dump.values.items():
        if _is_of(key, namespace) and (until_s is None or until_s > now):
            yield key.decode()[len(namespace) + 1 :], value, zlib.crc32(value), until_s


def _members(dump: RedisDump, namespace: str) -> Iterator[Member]:
    for key, scores in dump.lists.items():
        if _is_of(key, namespace):
            for member, score in scores.items():
                yield key.decode()[len(namespace) + 1 :], member.decode(), score
