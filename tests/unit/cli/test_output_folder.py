"""The folder that `simulate` and `plan` write to."""

import errno
import tempfile
from pathlib import Path

import pytest

from alignedserve.cli.console import require_writable
from alignedserve.core.errors import ConfigError
from lab.commands.output_folder import command_line, make_folder, write_file


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "new" / "folder")
    write_file(tmp_path / "new" / "folder" / "plan.yaml", b"topology: elastic\n")
    with pytest.raises(ConfigError, match=r"^--output \S+/new/folder: cannot be written: Is a directory$"):
        write_file(tmp_path / "new" / "folder", b"")
    with pytest.raises(ConfigError, match=r"^--output \S+/plan\.yaml/more: cannot be made: Not a directory$"):
        make_folder(tmp_path / "new" / "folder" / "plan.yaml" / "more")


def test_a_folder_that_takes_no_files_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def refuse(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # as of another user's folder
    with pytest.raises(ConfigError, match=r"^--output \S+: cannot be written: Permission denied$"):
        make_folder(tmp_path)


def test_whether_a_file_can_be_written_is_known_before_and_leaves_none(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    link = tmp_path / "link"
    link.symlink_to("target")
    for path in (kept, tmp_path / "new", link):
        require_writable(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link"]
    assert kept.read_text() == "kept"
    with pytest.raises(ConfigError, match=r"^--output \S+/kept/more: cannot be written: Not a directory$"):
        require_writable(kept / "more")


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/alignedserve", "plan", "--hardware", "4x h100 @2.5"])
    assert command_line() == "alignedserve plan --hardware '4x h100 @2.5'"
