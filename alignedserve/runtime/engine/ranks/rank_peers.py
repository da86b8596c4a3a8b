"""The peers of a rank beside the first: transfers to its parts of their blocks, and buffers that it lends them."""

from collections.abc import Sequence

from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.device_lender import DeviceLender
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest, PartTransfer
from alignedserve.runtime.kv.transfers.local_transfer import LocalTransfer, relay_unverified
from alignedserve.runtime.kv.transfers.open_channel import open_channel
from alignedserve.runtime.kv.transfers.own_buffer_transfer import OwnBufferTransfer
from alignedserve.runtime.kv.transfers.ranked_transfer import Checksums, PartsLoan, PartsOffer, PartsRelay, leave
from alignedserve.runtime.kv.transfers.registry import open_transfer


class RankPeers:
    """What a rank copies with each peer. Methods about one peer come from one thread."""

    def __init__(self, storage: BlockStorage) -> None:
        self._storage = storage
        self._transfers: dict[str, PartTransfer] = {}
        self._servers: dict[str, BlockServer] = {}
        self._lender: DeviceLender | None = None

    def open(self, peer: str, offer: PartsOffer) -> None:
        """Open a transfer to this rank's part of a peer's blocks. Raises TransportUnavailable or PeerLost."""
        self.close(peer)
        self._transfers[peer] = open_transfer(
            offer.offered, self._storage, identity=offer.identity, stamps=offer.stamps, transport=offer.transport
        )

    def lend(self, peer: str, loan: PartsLoan) -> str:
        """Lend a buffer of this rank's parts and return where it is served. Raises NotEnoughMemory."""
        self.close(peer)
        storage = self._storage
        assert storage.lanes is not None, "a buffer of a rank without a device"
        if self._lender is None:
            self._lender = DeviceLender(storage.layout, storage.part, storage.lanes, loan.max_blocks)
        buffer = self._lender.lend(loan.num_blocks)
        address = loan.addresses[storage.part.rank - 1]
        try:
            server = BlockServer(
                buffer, address, identity=loan.identity, transports=loan.transports, open_channel=open_channel
            )
        except OSError as error:  # such as no more file descriptors
            raise NotEnoughMemory(f"a rank could not open a socket to lend its candidate buffer: {error}") from error
        self._servers[peer] = server
        self._transfers[peer] = OwnBufferTransfer(storage, buffer)
        return server.address

    def close(self, peer: str) -> None:
        """Leave a peer's blocks, and take back what it was lent."""
        transfer, server = self._transfers.pop(peer, None), self._servers.pop(peer, None)
        if transfer is not None:
            leave(transfer)
        if server is not None:
            server.close()

    def close_all(self) -> None:
        """Leave all peers, once nothing copies any more."""
        for peer in {**self._transfers, **self._servers}:
            self.close(peer)

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> tuple[Checksums, ...]:
        """Copy parts out and return their checksums, by request. Raises PeerLost."""
        if peer not in self._transfers:
            return (None,) * len(requests)
        sent = self._transfers[peer].offload(requests)
        return tuple(None if runs is None else [run.checksum for run in runs] for runs in sent)

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> tuple[Checksums, ...]:
        """Copy parts in and return their checksums as they arrived, by request. Raises PeerLost."""
        if peer not in self._transfers:
            return (None,) * len(requests)
        return tuple(self._transfers[peer].fetch_unverified(requests))

    def relay(self, relay: PartsRelay) -> tuple[Checksums, ...]:
        """Copy parts between the blocks of two peers and return their checksums there, as Relayed."""
        source, target = self._transfers.get(relay.source), self._transfers.get(relay.target)
        if isinstance(source, LocalTransfer) and isinstance(target, LocalTransfer):
            relayed = relay_unverified(source, relay.copy, target, relay.target_block_ids, relay.generation)
            if relayed is not None:
                return relayed
        return None, None
