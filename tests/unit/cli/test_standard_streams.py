import os
import sys
from collections.abc import Callable

import pytest
import typer

from alignedserve.cli.console import open_closed_streams, print_json, results, written_output


def test_a_full_disk_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="1"), written_output():
            print("a table")
    assert capsys.readouterr().err == "error: the output cannot be written: No space left on device\n"


def test_a_reader_that_left_ends_a_command_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit, match="141"), written_output():
            print("a table")
    assert capsys.readouterr().err == ""


def _through_typer(text: str) -> None:
    app = typer.Typer()
    app.command()(lambda: typer.echo(text))
    app([])


@pytest.mark.parametrize("show", [_through_typer, lambda text: results().print(text)])
def test_libraries_that_end_a_command_without_a_reader_do_not_call_it_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], show: Callable[[str], None]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(sys, "stderr", sys.stderr)  # typer replaces it
        with pytest.raises(SystemExit, match="141"), written_output():
            show("a table")
    assert capsys.readouterr().err == ""


def test_other_errors_are_not_taken_for_output_that_cannot_be_written() -> None:
    with pytest.raises(FileNotFoundError), written_output():
        os.open("/no/such/file", os.O_RDONLY)
    with pytest.raises(SystemExit, match="7"), written_output():
        sys.exit(7)


def test_a_command_that_was_started_without_streams_prints_into_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_closed_streams()
    opened = [sys.stdin, sys.stdout, sys.stderr]
    results().print("a table")
    print_json({})
    assert sys.stdin.read() == ""
    assert all(os.get_inheritable(stream.fileno()) for stream in opened)
    for stream in opened:
        stream.close()
