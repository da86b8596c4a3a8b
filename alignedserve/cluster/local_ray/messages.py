"""Keeps what Ray has to say to its driver, such as that an actor has ended, in a file instead of the terminal."""

import logging
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ray._private import worker

from alignedserve.process.log_files import LossyFileHandler

_MAX_BYTES = 4 << 20
_logger = logging.getLogger(f"{__name__}.said")  # of its own: it goes nowhere else


class _MessageFile(LossyFileHandler, RotatingFileHandler):
    """A file of messages that begins anew when it is large."""


def keep_messages(path: Path) -> None:
    """Write all that Ray says from now on to this file. May be repeated, with another file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = _MessageFile(path, maxBytes=_MAX_BYTES, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for former in tuple(_logger.handlers):
        _logger.removeHandler(former)
        former.close()
    _logger.addHandler(handler)
    _logger.propagate = False
    _logger.setLevel(logging.INFO)
    worker.print_to_stdstream = _log


def _log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    """Stand in for Ray's function that prints what one of its processes says."""
    for text in data.get("lines", ()):
        _logger.info("%s: %s", data.get("pid", "ray"), text)
