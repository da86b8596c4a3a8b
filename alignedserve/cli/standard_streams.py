"""The three streams that a command is started with: any may be closed, and output may find a full disk or no reader."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from alignedserve.cli.console import FAILURE, NO_READER, print_error

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def open_closed_streams() -> None:
    """Have the streams that this process was started without lead nowhere.

    Else the next socket or file would have the number of one, and what is printed would go into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  (open as long as the process; it has the lowest free number)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


@contextmanager
def written_output() -> Iterator[None]:
    """Have all that is printed written at the end; where it cannot be, end with one line of why, without a reader with
    none."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except SystemExit as end:  # the libraries that print for us end so
        if not _has_no_reader(end.__context__):
            raise
        discard_output()
        sys.exit(NO_READER)
    except OSError as error:
        if error.errno not in (*_NO_ROOM, errno.EPIPE):
            raise
        discard_output()
        if _has_no_reader(error):
            sys.exit(NO_READER)
        print_error(f"the output cannot be written: {error.strerror}")
        sys.exit(FAILURE)


def _has_no_reader(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def discard_output() -> None:
    """Have stdout lead nowhere, so that what could not be written is not written again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
