"""The log of a cluster's driver, beside those of the head's other processes."""

import logging
from pathlib import Path

from alignedserve.cluster.hosts.members import DRIVER
from alignedserve.process.log_files import LogFileHandler


class DriverLog:
    """Writes what the package says to a file, until it is closed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._package = logging.getLogger("alignedserve")
        self._handler = LogFileHandler(folder / f"{DRIVER}.log")
        self._package.addHandler(self._handler)
        self._package.setLevel(logging.INFO)

    def close(self) -> None:
        """Write no more. May be repeated."""
        self._package.removeHandler(self._handler)
        self._handler.close()
