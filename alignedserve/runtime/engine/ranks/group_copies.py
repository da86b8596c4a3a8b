"""The copies of the ranks beside the first, as the first orders them and waits for them."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from alignedserve.core.errors import PeerLost, ProtocolError, TransportUnavailable
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
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsOffer, Waited
from kernels.cpu.rank_exchange import ExchangeBroken

_Answer = Future[CopyDone]


class GroupCopies:
    """Implements RankCopies over a connection to each rank. From any thread."""

    def __init__(self, connections: Sequence[socket.socket], num_frames: Callable[[], int]) -> None:
        """`num_frames`: how many frames of steps the ranks were sent so far."""
        self.size = len(connections) + 1
        self._connections = connections
        self._num_frames = num_frames
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_lost = False
        self._awaited: list[dict[int, _Answer]] = [{} for _ in connections]
        for connection, awaited in zip(connections, self._awaited, strict=True):
            threading.Thread(target=self._receive, args=(connection, awaited), name="rank copies", daemon=True).start()

    def open(self, peer: str, offer: PartsOffer) -> None:
        refusals = [done.refusal for done in _awaited(self._order(OpenBlocks(peer, offer)))]
        if any(refusals):
            raise TransportUnavailable(_reasons(refusals))

    def close(self, peer: str) -> None:
        with contextlib.suppress(ExchangeBroken):
            self._order(CloseBlocks(peer))

    def offload(self, peer: str, requests: Sequence[OffloadRequest]) -> Waited:
        return self._copied(OffloadParts(peer, tuple(requests)))

    def fetch(self, peer: str, requests: Sequence[FetchRequest]) -> Waited:
        return self._copied(FetchParts(peer, tuple(requests)))

    def end(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _copied(self, command: CopyCommand) -> Waited:
        answers = self._order(command)
        return lambda: [done.checksums for done in _awaited(answers)]

    def _order(self, command: CopyCommand) -> list[_Answer]:
        touches_steps = isinstance(command, OffloadParts | FetchParts)
        answers: list[_Answer] = [Future() for _ in self._connections]
        with self._lock:  # so that all ranks see commands in one order
            if self._is_lost:
                raise ExchangeBroken("a rank of this worker has ended")
            number = next(self._numbers)
            payload = encode(OrderedCopy(number, self._num_frames() if touches_steps else 0, command))
            for connection, awaited, answer in zip(self._connections, self._awaited, answers, strict=True):
                awaited[number] = answer
                try:
                    send_frame(connection, payload)
                except OSError as error:
                    raise ExchangeBroken("a rank of this worker has ended") from error
        return answers

    def _receive(self, connection: socket.socket, awaited: dict[int, _Answer]) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            while (payload := receive_frame(connection)) is not None:
                done = decode(payload, CopyDone)
                with self._lock:
                    answer = awaited.pop(done.number, None)
                if answer is not None:  # otherwise it has failed with another rank's
                    answer.set_result(done)
        with self._lock:
            self._is_lost = True  # whatever other ranks may answer yet: see _order
            lost = [answer for each in self._awaited for answer in each.values()]
            for each in self._awaited:
                each.clear()
        for answer in lost:
            answer.set_exception(ExchangeBroken("a rank of this worker has ended"))


def _awaited(answers: Sequence[_Answer]) -> list[CopyDone]:
    done = [answer.result() for answer in answers]
    if any(one.is_lost for one in done):
        raise PeerLost("the peer of a rank's copy is gone")
    return done


def _reasons(refusals: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(refusals, 1) if reason)
