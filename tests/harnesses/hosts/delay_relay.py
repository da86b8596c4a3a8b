"""A relay of Ethernet frames between two interfaces that delays one direction: `python -m ... OUTER TAP SECONDS`.

Frames of OUTER (one end of a host's cable) go to the TAP device after the delay, those of the TAP to OUTER at once.
Both speak with virtio headers, in which the kernel leaves checksums and segments to the last receiver.
"""

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP_WITH_HEADERS = 0x0002 | 0x1000 | 0x4000  # IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_OUTGOING = 263, 15, 4
_MAX_FRAME_BYTES = 1 << 17
_MAX_DELAYED = 1 << 14  # frames; a longer queue of a slow relay loses packets, as any router does
_LOOK_S = 1.0


def relay(outer: socket.socket, tap: int, delay_s: float) -> None:
    """Relay until the process is ended."""
    delayed: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(delayed[0][0] - time.monotonic(), 0.0) if delayed else _LOOK_S
        readable, _, _ = select.select([outer.fileno(), tap], [], [], wait_s)
        if outer.fileno() in readable:
            frame, address = outer.recvfrom(_MAX_FRAME_BYTES)
            if address[2] != _PACKET_OUTGOING and len(delayed) < _MAX_DELAYED:
                delayed.append((time.monotonic() + delay_s, frame))
        if tap in readable:
            _send(outer, os.read(tap, _MAX_FRAME_BYTES))
        while delayed and delayed[0][0] <= time.monotonic():
            os.write(tap, delayed.popleft()[1])


def _send(outer: socket.socket, frame: bytes) -> None:
    try:
        outer.send(frame)
    except OSError:
        return  # the host's end is down, or its queue is full: a lost packet


def main(outer_name: str, tap_name: str, delay_s: float) -> None:
    """Open both interfaces, say so, and relay."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", tap_name.encode(), _TAP_WITH_HEADERS))
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as outer:
        outer.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        outer.bind((outer_name, _ALL_PROTOCOLS))
        print("ready", flush=True)
        relay(outer, tap, delay_s)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
