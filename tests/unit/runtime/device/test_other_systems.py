"""What Linux alone has may be absent: cores, shared memory and the rest are then found in another way."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from alignedserve.cluster.deployments import admin_api
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.device import cores
from alignedserve.runtime.device.memory_maps import map_file, take_pages
from alignedserve.runtime.kv import arena_files, shm_arena
from kernels.cpu.unnamed_files import take_space, unnamed_file

_PAGE = 4096


def test_all_cores_are_used_where_processes_have_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores.num_cores() == 6
    assert cores.threads_per_worker(2) == 3


def test_arenas_are_temporary_files_where_there_is_no_folder_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(arena_files, "_SHARED_MEMORY", tmp_path / "shm")
    assert arena_files.arena_folder() == Path(tempfile.gettempdir())


def test_a_folder_of_shared_memory_that_cannot_be_written_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NotEnoughMemory, match="not writable"):
        arena_files.arena_folder()


def test_memory_is_shared_by_a_file_where_there_are_none_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memfd_create", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    descriptor = unnamed_file("test")
    try:
        os.ftruncate(descriptor, 3 * _PAGE)
        one, other = map_file(descriptor, 3 * _PAGE), map_file(descriptor, 3 * _PAGE)
        take_pages(descriptor, lambda: one, 3 * _PAGE)
        one[2 * _PAGE] = 7
        assert other[2 * _PAGE] == 7
        assert os.fstat(descriptor).st_nlink == 0
    finally:
        os.close(descriptor)


def test_taking_space_never_shortens_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    with (tmp_path / "file").open("w+b") as file:
        take_space(file.fileno(), _PAGE, _PAGE)
        take_space(file.fileno(), 0, _PAGE)
        assert os.fstat(file.fileno()).st_size == 2 * _PAGE


def test_certificates_are_read_from_a_file_that_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    CertificateAuthority.new("cluster").issue("router").listener_context()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_a_boot_id_is_told_by_its_name_and_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("wb") as file:
        linux = shm_arena._identify(file.fileno())
        monkeypatch.setattr(shm_arena, "_BOOT_ID", tmp_path / "absent")
        other, again = (shm_arena._identify(file.fileno()) for _ in range(2))
    assert other == again
    assert other.partition("/")[2] == linux.partition("/")[2]
    assert other.partition("/")[0]


def test_the_processor_is_named_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "_CPU_INFO", tmp_path / "absent")
    assert cores.processor_name()


def test_the_user_of_a_connection_is_read_from_macos_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connection:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option, size) == (0, 1, 76)
            return admin_api._MACOS_PEER.pack(0, 501, 1, 20, *(0,) * 15)

    monkeypatch.delattr(socket, "SO_PEERCRED")
    assert admin_api._user_of(Connection()) == 501  # type: ignore[arg-type]
