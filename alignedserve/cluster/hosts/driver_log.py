"""The log of a cluster's driver, beside those of the head's other processes."""

import logging
from pathlib import Path

from alignedserve.cluster.hosts.members import DRIVER


class DriverLog:
    """Writes what the package says to a file, until it is closed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._package = logging.getLogger("alignedserve")
        self._handler = logging.FileHandler(folder / f"{DRIVER}.log")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._package.addHandler(self._handler)
        self._package.setLevel(logging.INFO)

    def close(self) -> None:
        """Write no more. May be repeated."""
        self._package.removeHandler(self._handler)
        self._handler.close()
