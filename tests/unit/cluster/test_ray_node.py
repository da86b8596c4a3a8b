"""The Ray of one host: what it would start and where it would listen, changed for one start alone."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from ray._private import ray_constants, services, utils
from ray._private.node import Node

from alignedserve.cluster.local_ray.start import _UNUSED_PROCESSES, _restrained, start_ray
from alignedserve.core.errors import ResourceError
from tests.support.marks import each


def state() -> list[Any]:
    methods = [getattr(Node, name) for name in (*_UNUSED_PROCESSES, "_prepare_socket_file")]
    return [*methods, ray_constants.ENABLE_RAY_CLUSTER, utils.get_dashboard_dependency_error]


def fail_to_start(folder: Path) -> None:
    with _restrained(folder):
        raise OSError("a process is late")


def test_ray_starts_no_unused_process_and_listens_on_loopback_for_one_start(tmp_path: Path) -> None:
    before = state()
    with _restrained(tmp_path):
        assert [getattr(Node, name)(None) for name in _UNUSED_PROCESSES] == [None, None, None]
        assert services.get_node_ip_address() == "127.0.0.1"  # type: ignore[no-untyped-call]
        assert vars(Node)["_prepare_socket_file"](None, None, "raylet") == str(tmp_path / "raylet.sock")
    assert state() == before
    with pytest.raises(OSError, match="late"):
        fail_to_start(tmp_path)
    assert state() == before


def test_a_folder_that_ray_cannot_name_is_refused_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="rö; set ALIGNEDSERVE_RUN_DIR to one in ASCII"):
        start_ray(tmp_path / "rö" / "1a2b3c4d", "alignedserve")


@each(
    ("error", "message"),
    [
        (Exception("The current node timed out"), "The current node timed out; is this machine overloaded?"),
        (TimeoutError("after 30 seconds"), "after 30 seconds; is this machine overloaded?"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_a_start_of_ray_that_fails_asks_for_load_where_that_may_be_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", fail)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ResourceError) as raised:
        start_ray(tmp_path, "alignedserve")
    assert str(raised.value) == f"Ray did not start: {message}"
