"""Logs whose disk is full."""

import logging
from pathlib import Path

import pytest

from alignedserve.process.logs.files import LogFileHandler


def test_what_a_full_disk_does_not_take_is_lost_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logger, path = logging.getLogger("tests.full"), tmp_path / "router-0.log"
    path.symlink_to("/dev/full")
    handler = LogFileHandler(path)
    logger.addHandler(handler)
    logger.propagate = False
    for _ in range(3):
        logger.warning("nobody reads this")
    path.unlink()
    logger.removeHandler(handler)
    handler.close()
    assert capfd.readouterr() == ("", "")


def test_lines_tell_when_who_and_how_bad(tmp_path: Path) -> None:
    logger, path = logging.getLogger("tests.written"), tmp_path / "router-0.log"
    handler = LogFileHandler(path)
    logger.addHandler(handler)
    logger.warning("a worker was lost")
    logger.removeHandler(handler)
    handler.close()
    assert path.read_text().endswith(" WARNING tests.written: a worker was lost\n")
