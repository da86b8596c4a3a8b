"""Terminal output that the commands share: results on stdout, all else on stderr."""

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from alignedserve.core.errors import AlignedServeError, ConfigError, NodeLost

DEFAULT_URL = "http://127.0.0.1:8000"
USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
NO_READER = 141  # as a program that SIGPIPE ends: `| head` has read what it wanted
WIDEST = 10_000  # columns of a table that is not to be folded
_TABLE_WIDTH = 120  # when the output is a file, where rich would assume 80 columns


def results() -> Console:
    return Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH, highlight=False)


def print_table(table: RenderableType) -> None:
    """Print a table, or several, at its own width, so that a narrow terminal wraps its lines and no figure is cut."""
    console = results()
    measured = console.measure(table, options=console.options.update(max_width=WIDEST))
    console.width = max(console.width, measured.maximum)
    console.print(table)


def notes() -> Console:
    return Console(stderr=True, highlight=False)


def print_error(error: AlignedServeError | str) -> None:
    line = " ".join(str(error).split())
    print(f"error: {line}", file=sys.stderr, flush=True)


def exit_code(error: AlignedServeError) -> int:
    """Return 2 for errors of the command line or the configuration, 75 when Ray was lost, 1 for all others."""
    if isinstance(error, NodeLost):
        return os.EX_TEMPFAIL  # by which supervisors know that another try may help
    return USAGE_ERROR if isinstance(error, ConfigError) else FAILURE


def progress() -> Progress:
    """Return a progress bar on stderr; nothing where stderr is not a terminal."""
    console = notes()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        refresh_per_second=4,  # drawing costs CPU that the measured system may need
    )


def print_json(document: object) -> None:
    write_json(json.dumps(document, indent=2).encode() + b"\n", "-")


def write_json(document: bytes, target: str) -> None:
    """Write to a file, or to stdout when `target` is a dash. Raises ConfigError."""
    if target == "-":
        sys.stdout.write(document.decode())
        sys.stdout.flush()
        return
    try:
        Path(target).write_bytes(document)
    except OSError as error:
        raise ConfigError(f"--json {target}: cannot be written: {error.strerror}") from error


def require_writable(path: Path, *, option: str = "--output") -> None:
    """Check that a file can be written; to be called before anything runs. Raises ConfigError."""
    is_there = path.exists()
    try:
        path.open("ab").close()
        if not is_there:
            path.resolve().unlink()  # of a link, what it names
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return the text without control characters, so that a model's answer cannot command the terminal."""
    if text.isprintable():
        return text
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def chat_command(url: str, called: str) -> str:
    """Return what to type to talk to the server at this address, as this program itself was called. So the environment
    need not be activated."""
    program = f"{sys.executable} -m alignedserve" if called.endswith("__main__.py") else called
    return f"{program} chat" if url == DEFAULT_URL else f"{program} chat --url {url}"


def to_json(report: object) -> bytes:
    import msgspec  # not loaded for `--help`

    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def open_closed_streams() -> None:
    """Have the streams that this process was started without lead nowhere. Else the next socket or file would have the
    number of one, and what is printed would go into it."""
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
