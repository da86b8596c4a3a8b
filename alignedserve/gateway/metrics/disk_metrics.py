"""Space in the file systems that a gateway's host writes to."""

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.5  # a file system that takes longer is told of at a later scrape


class Disks:
    """File systems by what is kept there. One that hangs holds up one thread, and no scrape."""

    def __init__(self, places: Mapping[str, Path] | None = None) -> None:
        self._places = places or {}
        self._measuring: asyncio.Future[bytes] | None = None

    async def metrics(self) -> bytes:
        """Return the text that Prometheus scrapes; nothing where there are no places, or one does not answer."""
        if not self._places:
            return b""
        if self._measuring is None:
            self._measuring = asyncio.get_running_loop().run_in_executor(None, _measured, self._places)
        try:
            text = await asyncio.wait_for(asyncio.shield(self._measuring), _PATIENCE_S)
        except TimeoutError:
            return b""
        self._measuring = None
        return text


def _measured(places: Mapping[str, Path]) -> bytes:
    registry = CollectorRegistry()
    size = Gauge(
        "alignedserve_disk_bytes", "Size of a file system, by what is kept there.", ["place"], registry=registry
    )
    free = Gauge("alignedserve_disk_free_bytes", "Bytes of it that are free for us.", ["place"], registry=registry)
    for place, path in places.items():
        try:
            found = os.statvfs(path)
        except OSError as error:
            logger.warning("the file system of %s cannot be measured: %s", path, error.strerror)
            continue
        size.labels(place).set(found.f_blocks * found.f_frsize)
        free.labels(place).set(found.f_bavail * found.f_frsize)
    return generate_latest(registry)
