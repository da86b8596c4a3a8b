"""The specification of a process of a cluster, the same when it is restarted."""

import hashlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from alignedserve.config.sections import RecordingConfig
from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import FIRST_DEPLOYMENT, ROUTER, AddressBook, deployed_name
from alignedserve.process.links import Identity
from alignedserve.process.logs import TEXT
from alignedserve.process.recorder import Recorder, open_recorder
from alignedserve.process.tls import Credentials

POOL = "pool-0"  # of the first node; every node has its own
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process's identity, addresses and logging in one cluster."""

    role: Role
    name: str
    cluster_id: str
    secret: bytes = field(repr=False)  # never in a log
    peer_timeout_s: float
    addresses: AddressBook
    log_folder: Path
    recording: RecordingConfig = field(default_factory=RecordingConfig)
    pool_name: str = POOL  # the KV pool of its node
    credentials: Credentials | None = None  # for other hosts
    joins_others: bool = False  # its model was added while others serve: it loads without disturbing them
    notes_requests: bool = False  # it tells gateways the course of their requests
    log_format: str = TEXT
    logs_steps: bool = False  # a line for every message about one request
    deployment_id: str = FIRST_DEPLOYMENT  # of the model that it belongs to; gateways belong to none

    @property
    def router_name(self) -> str:
        return deployed_name(ROUTER, self.deployment_id)

    def identity(self) -> Identity:
        return Identity(self.role, self.name, self.secret, self.peer_timeout_s, self.credentials)

    def prefix_key(self) -> bytes:
        """Return the key of the cluster's block hashes (prefix cache): one for all processes, and for one cluster. It
        follows from the secret, which is random and made at the cluster's start. Never in a log or a recording."""
        return hashlib.blake2b(b"prefix cache", digest_size=_KEY_BYTES, key=self.secret).digest()

    def recorder(self, make: "partial[Any]") -> Recorder | None:
        """Return a recorder of the decisions of the logic that `make` makes; None: recording is off."""
        return open_recorder(self.recording, self.name, make)

    def progress_path(self) -> Path:
        return self.addresses.progress_of(self.name)
