"""The copies of the ranks beside the first, as the first orders them and waits for them."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from alignedserve.core.errors import ProtocolError
from alignedserve.messages.caches import ArenaOffered
from alignedserve.runtime.engine.ranks.copy_commands import (
    CloseBlocks,
    CopyCommand,
    CopyDone,
    FetchParts,
    OffloadParts,
    OpenBlocks,
    OrderedCopy,
)
from alignedserve.runtime.engine.ranks.frames import decode, encode, receive_frame, send_frame
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.ranked_transfer import Checksums, Waited
from kernels.cpu.rank_exchange import ExchangeBroken

_Answer = Future[Sequence[Checksums]]


class GroupCopies:
    """Implements RankCopies over a connection to each rank. From any thread."""

    def __init__(self, connections: Sequence[socket.socket], num_frames: Callable[[], int]) -> None:
        """`num_frames`: how many frames of steps the ranks were sent so far."""
        self._connections = connections
        self._num_frames = num_frames
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_lost = False
        self._awaited: list[dict[int, _Answer]] = [{} for _ in connections]
        for connection, awaited in zip(connections, self._awaited, strict=True):
            threading.Thread(target=self._receive, args=(connection, awaited), name="rank copies", daemon=True).start()

    def open(self, peer: str, offered: ArenaOffered) -> None:
        """See RankCopies."""
        self._order(OpenBlocks(peer, offered))

    def close(self, peer: str) -> None:
        """See RankCopies."""
        with contextlib.suppress(ExchangeBroken):
            self._order(CloseBlocks(peer))

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> Waited:
        """See RankCopies."""
        return self._order(OffloadParts(peer, tuple(requests)))

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> Waited:
        """See RankCopies."""
        return self._order(FetchParts(peer, tuple(requests)))

    def end(self) -> None:
        """Close the connections; what is waited for fails."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _order(self, command: CopyCommand) -> Waited:
        answers: list[_Answer] = [Future() for _ in self._connections]
        with self._lock:  # so that all ranks see commands in one order
            if self._is_lost:
                raise ExchangeBroken("a rank of this worker has ended")
            number = next(self._numbers)
            payload = encode(OrderedCopy(number, self._num_frames(), command))
            for connection, awaited, answer in zip(self._connections, self._awaited, answers, strict=True):
                awaited[number] = answer
                try:
                    send_frame(connection, payload)
                except OSError as error:
                    raise ExchangeBroken("a rank of this worker has ended") from error
        return lambda: [answer.result() for answer in answers]

    def _receive(self, connection: socket.socket, awaited: dict[int, _Answer]) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            while (payload := receive_frame(connection)) is not None:
                done = decode(payload, CopyDone)
                with self._lock:
                    answer = awaited.pop(done.number, None)
                if answer is not None:  # otherwise it has failed with another rank's
                    answer.set_result(done.checksums)
        with self._lock:
            self._is_lost = True  # whatever other ranks may answer yet: see _order
            lost = [answer for each in self._awaited for answer in each.values()]
            for each in self._awaited:
                each.clear()
        for answer in lost:
            answer.set_exception(ExchangeBroken("a rank of this worker has ended"))
