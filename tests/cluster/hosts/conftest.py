"""Two hosts of namespaces with a cluster on them, which the tests of this folder share: `ray up` takes a minute."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.runtime.model.served_model import resolve_model
from tests.harnesses.hosts.namespace_hosts import NamespaceHosts
from tests.harnesses.hosts.rehearsal import SETTINGS, Rehearsal
from tests.support.models.lora_folders import write_adapter
from tests.support.waiting import wait_until

# Ray's own processes wait for a head that is gone, which is 60 s by default.
SOON = {"RAY_gcs_rpc_server_reconnect_timeout_s": "15"}
MODELS = ("pocket", "b=pocket")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/run", prefix="alignedserve-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of the shared hosts last: these stay until the end, and a machine has one set of hosts at a time."""
    items.sort(key=lambda item: "rehearsal" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="module")
def hosts_folder() -> Iterator[Path]:
    """The folder of a set of hosts, which have a /tmp of their own each."""
    with _folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def rehearsal() -> Iterator[Rehearsal]:
    """Two hosts, each with a worker of both models, batches, and an adapter to load. Their end is a test too."""
    with _folder() as folder:
        write_adapter(folder / "adapters" / "terse", resolve_model(ModelSectionConfig()).decoder)
        batches = ("batches.enabled=true", f"batches.folder={folder / 'state'}")
        own = ("decode.max_running_requests=8", "router.moves_between_nodes=true")
        settings = (*SETTINGS, *batches, *own, f"lora.allowed_folder={folder / 'adapters'}")
        hosts = NamespaceHosts(2, folder, [Path(entry) for entry in sys.path if Path(entry).is_dir()])
        made = Rehearsal(hosts, settings, SOON, MODELS)
        made.prepare()
        with hosts:
            made.up()
            yield made
            made.ray("down")
            wait_until(lambda: not _left(hosts), 120.0, lambda: _left(hosts))


def _left(hosts: NamespaceHosts) -> list[str]:
    """Return the processes and the shared memory that outlive the cluster."""
    left = [line for host in hosts.hosts for line in host.processes()]
    return left + [line for host in hosts.hosts for line in host.run("ls", "/dev/shm").stdout.split()]
