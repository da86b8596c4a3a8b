"""Whose records a namespace of a Redis has: clusters with folders of their own would fail each other's batches there.

The driver of batches claims the namespace for its state folder every few seconds. A cluster that starts with another
folder watches for longer than that: a claim that changes meanwhile is of one that runs. Clusters that share a folder
too, and their drivers' successors, make the same claim."""

import asyncio
import contextlib
import logging
import os
import secrets
from pathlib import Path

from alignedserve.batches.interfaces import RecordStore
from alignedserve.core.errors import StorageError
from alignedserve.disk.durable import write_durably
from alignedserve.messages.state import SetValue

CLAIM = "folder"  # its key
WATCH_S = 7.0
_CLAIM_S = 3.0
_KEPT_S = 60.0
_NAME = "folder.id"
_HARM = "each fails the batches of the other; stop one of them, and set its batches.namespace to another name"

logger = logging.getLogger(__name__)


def folder_id(folder: Path) -> str:
    """Return what names a state folder, from its first use on."""
    path = folder / _NAME
    if not path.exists():
        drawn = folder / f"{_NAME}.{secrets.token_hex(8)}"
        write_durably(drawn, secrets.token_hex(16).encode())
        with contextlib.suppress(FileExistsError):  # clusters that share the folder may start at the same time
            os.link(drawn, path)
        drawn.unlink()
    return path.read_text()


def is_of_other(claim: bytes | None, claimant: str) -> bool:
    return claim is not None and claim.partition(b" ")[0] != claimant.encode()


async def claim_on(records: RecordStore, claimant: str, namespace: str) -> None:
    """Claim the namespace for this folder, again and again, and log once that another cluster does so as well."""
    claim, is_told = None, False
    while True:
        try:
            stored = (await records.read([CLAIM]))[0]
            if claim is not None and is_of_other(stored, claimant) and not is_told:
                is_told = True
                logger.error("a cluster with another folder uses batches.namespace=%s too: %s", namespace, _HARM)
            claim = f"{claimant} {secrets.token_hex(8)}".encode()
            await records.commit([SetValue(CLAIM, claim, _KEPT_S)], unchanged={})
        except StorageError:
            logger.debug("the namespace is not claimed now", exc_info=True)
        await asyncio.sleep(_CLAIM_S)
