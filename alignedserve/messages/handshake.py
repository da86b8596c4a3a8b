"""The first messages on every link: both ends prove that they know the cluster's secret, then give their names."""

import enum
from typing import Annotated

import msgspec

from alignedserve.messages.wire import Message

Nonce = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class Role(enum.Enum):
    """Kinds of processes."""

    GATEWAY = "gateway"
    ROUTER = "router"
    KV_POOL = "kv_pool"
    PREFILL_WORKER = "prefill_worker"
    DECODE_WORKER = "decode_worker"
    STATE_SERVER = "state_server"  # beside the driver of batches


class Challenge(Message, frozen=True):
    """Listener to dialler, first message: the nonce to prove knowledge of the secret on."""

    version: int  # protocol version; both ends must have the same
    nonce: Nonce  # fresh random bytes


class Hello(Message, frozen=True):
    """Dialler to listener: its name, the proof, and a nonce for the listener to answer."""

    version: int
    role: Role
    name: Name  # unique in the cluster, the same after a restart
    proof: Nonce  # HMAC-SHA256(secret, "dialler" + listener's nonce + name)
    nonce: Nonce
    dialled: Annotated[str, msgspec.Meta(max_length=128)] = ""  # the process that it means to reach; empty: any


class Welcome(Message, frozen=True):
    """Listener to dialler: accepted; the listener's own name and proof."""

    role: Role
    name: Name
    proof: Nonce  # HMAC-SHA256(secret, "listener" + dialler's nonce + name)


class Ping(Message, frozen=True):
    """Either way, about once a second and first of all: a sign of life. A silent peer is a lost peer."""

    clock_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]  # the sender's monotonic clock


HandshakeMessage = Challenge | Hello | Welcome
