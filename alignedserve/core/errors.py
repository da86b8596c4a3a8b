"""The closed tree of errors that outside input or a lost peer can raise.

AlignedServeError
├── ConfigError                 a config field, command-line value or environment variable is wrong
├── InvalidRequest              a client asked for something malformed or unsupported (HTTP 400)
│   └── ContextTooLong          prompt and requested tokens do not fit the model's context
├── ModelError                  the model folder cannot be served
│   ├── ModelNotFound           no such folder, or files of it are missing
│   ├── AdapterError            an adapter's folder cannot be used with the model
│   ├── UnsupportedModel        an architecture or option that the engine does not have
│   └── UnsafeWeights           weights in a format that executes code when loaded (pickle)
├── RecordingError              a recorded run that cannot be read, or cannot be replayed
├── ResourceError               this machine lacks the requested resource
│   ├── NotEnoughMemory         names how much is needed and what to set
│   ├── AddressInUse            another process listens there
│   ├── DeviceLost              a GPU stopped working; its process ends
│   └── TransportUnavailable    no transport, or not the configured one, for blocks between two workers
├── StorageError                files or the state of batches cannot be read or kept now
│   ├── StoreUnavailable        the state store does not answer
│   │   └── StoreFull           its disk is full
│   ├── StorageFull             the disk of the files is full
│   └── StorageDamaged          stored data fails its check, or is of an unknown version
└── PeerError                   another process of the cluster misbehaved or went away
    ├── NodeLost                Ray's processes on this host have ended, and with them what would start others again
    ├── PeerLost                connection closed or silent past its deadline
    │   └── NothingListens      a server's address takes no connections
    ├── ProtocolError           a message that does not decode, is too large, or has an unknown tag
    └── HandoffRejected         a KV handoff whose lease, bounds or checksum are wrong

Broken invariants of our own are `assert` with a message; "not now" is a value, not an error.
"""

import enum


class AlignedServeError(Exception):
    """Root of the tree. The message is safe to show to a user."""


class ConfigError(AlignedServeError, ValueError):
    """A config value is wrong; the message names the field."""


class InvalidRequest(AlignedServeError, ValueError):
    """The client's request is wrong; `param` names the field, if it is one field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """Prompt and requested output together exceed the context length; `num_tokens` of the prompt, if they are known."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, num_tokens: int | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.num_tokens = num_tokens


class ModelError(AlignedServeError):
    """The model folder cannot be served."""


class ModelNotFound(ModelError):
    """The folder or one of its files is missing."""


class AdapterError(ModelError):
    """An adapter's folder cannot be used with the model."""


class UnsupportedModel(ModelError):
    """The engine does not have this architecture or option."""


class UnsafeWeights(ModelError):
    """Weights in a pickle-based format; only safetensors are read."""


class PolicyError(AlignedServeError):
    """A scheduling policy of another package planned what its worker cannot do."""


class RecordingError(AlignedServeError):
    """A recorded run is damaged, of another version, or holds something unknown to this program."""


class ResourceError(AlignedServeError):
    """This machine lacks the requested resource."""


class NotEnoughMemory(ResourceError):
    """Memory for weights, blocks or the pool does not fit; the message says what to set."""


class AddressInUse(ResourceError):
    """The port or socket is taken."""


class DeviceLost(ResourceError):
    """A GPU has failed while it computed. This process can no longer use it, and ends."""


class TransportUnavailable(ResourceError):
    """Blocks cannot be moved between two workers by the configured transport, or by any."""


class StorageError(AlignedServeError):
    """Files or the state of batches cannot be read or kept now."""


class StoreUnavailable(StorageError):
    """The state store does not answer; a change under way may or may not have been made."""


class StoreFull(StoreUnavailable):
    """The disk of the state store is full; the change under way was not made."""


class StorageFull(StorageError):
    """The disk of the files is full; the write under way was not made."""


class StorageDamaged(StorageError):
    """Stored data fails its check, or is of a version unknown to this program."""


class PeerError(AlignedServeError):
    """Another process of the cluster misbehaved or went away."""


class NodeLost(PeerError):
    """Ray is lost on this host: what serves there is ended, and may be started anew as a whole."""


class PeerLost(PeerError):
    """The connection closed or stayed silent past its deadline."""


class NothingListens(PeerLost):
    """Nothing listens at the address of a server."""

    def __init__(self, url: str) -> None:
        super().__init__(f"nothing answers at {url}; `alignedserve serve` starts a server")
        self.url = url


class ProtocolError(PeerError):
    """A message does not decode, exceeds its bounds or has an unknown tag."""


class HandoffRejected(PeerError):
    """A KV handoff whose lease, bounds or checksum are wrong: treated as a miss, never as data."""


class FailureKind(enum.Enum):
    """Why a request that was accepted will not be completed."""

    OVERLOADED = "overloaded"  # no capacity, and no time left to wait for it
    WORKER_LOST = "worker_lost"  # its worker died after tokens had been sent
    INTERNAL = "internal"  # a fault of the server, logged where it happened
    UNSERVABLE = "unservable"  # can never fit this cluster
    GRAMMAR = "grammar"  # no token can follow under its grammar
