"""The pool's process: what is left when it cannot start."""

from pathlib import Path

import pytest

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import AddressBook
from alignedserve.process.process_spec import POOL, ProcessSpec
from kvpool.service import KvPool


class _EmptyDirectory:
    """No process has published where it is."""

    def publish(self, name: str, entry: str) -> None:
        """See Directory."""

    def look_up(self, name: str) -> str | None:
        """See Directory."""


def test_no_memory_is_left_when_the_address_of_its_node_cannot_be_listened_at(tmp_path: Path) -> None:
    # An address for documentation, which no host has.
    book = AddressBook(tmp_path, "node", "192.0.2.1", _EmptyDirectory(), has_tls=False)
    process_spec = ProcessSpec(Role.KV_POOL, POOL, "test", b"secret", 5.0, book, tmp_path)
    path = tmp_path / "pool.arena"
    with pytest.raises(OSError, match="assign"):
        KvPool(
            config=PoolConfig(memory_bytes=1 << 20),
            batching=BatchingConfig(),
            layout=BlockLayout(16, 1, 1, 4, "float16"),
            arena_path=path,
            process_spec=process_spec,
        )
    assert not path.exists()
