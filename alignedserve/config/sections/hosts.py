"""The sections of processes and nodes: links between them, recordings, growing and shrinking."""

from alignedserve.config.sections.base import MIB, Section


class LinksConfig(Section, frozen=True):
    """Sockets between processes."""

    peer_timeout_s: float = 5.0  # a peer silent for this long is lost
    hang_timeout_s: float = 20.0  # a process that has answered nothing for this long is ended and started again
    restart_on_node_loss: bool = True  # on one host, when Ray is lost there; false: `serve` ends with exit code 75
    transport: str = "unix"  # between processes of one host
    tls: bool = (
        True  # between hosts, with certificates that the cluster makes; false: in clear, on a network of its own
    )

    def __post_init__(self) -> None:
        self._require(0.5 <= self.peer_timeout_s <= 3600.0, "peer_timeout_s", "must be between 0.5 and 3600")
        self._require(self.hang_timeout_s >= 2.0, "hang_timeout_s", "must be at least 2")
        self._require(self.transport == "unix", "transport", "must be unix: between hosts links.tls decides")


class RecordingConfig(Section, frozen=True):
    """Recording of every component's decisions, for `alignedserve replay`."""

    folder: str | None = None  # on every node, empty or absent at the start; unset: nothing is recorded
    tokens: bool = False  # keep the tokens of prompts and answers; False: only what decisions depend on
    commands: bool = False  # keep what was decided, not only its digest
    max_bytes: int = 1024 * MIB  # of one process; its recording then ends, and it goes on

    def __post_init__(self) -> None:
        self._require(self.folder is None or bool(self.folder), "folder", "must name a folder")
        self._require_positive("max_bytes")


class ScalingConfig(Section, frozen=True):
    """Nodes that Ray's autoscaler adds and removes with the load, on a cluster of several hosts."""

    max_nodes: int | None = None  # with the head; unset: the nodes are those that there are
    min_nodes: int = 1
    target_load: float = 0.8  # real-time requests per place of a decode worker; above it nodes are added
    max_wait_s: float = 5.0  # forecast for queued real-time requests; above it nodes are added
    up_after_s: float = 3.0  # nodes are added when they were wanted for this long
    down_after_s: float = 300.0  # a node is given back when it was not wanted for this long

    def __post_init__(self) -> None:
        self._require(1 <= self.min_nodes <= 10_000, "min_nodes", "must be between 1 and 10000")
        is_range = self.max_nodes is None or self.min_nodes <= self.max_nodes <= 10_000
        self._require(is_range, "max_nodes", "must be between scaling.min_nodes and 10000")
        self._require(0.0 < self.target_load <= 10.0, "target_load", "must be above 0 and at most 10")
        self._require(1.0 <= self.max_wait_s <= 120.0, "max_wait_s", "must be between 1 and 120")
        self._require(0.0 <= self.up_after_s <= 3600.0, "up_after_s", "must be between 0 and 3600")
        is_later = self.up_after_s <= self.down_after_s <= 86_400.0
        self._require(is_later, "down_after_s", "must be between scaling.up_after_s and 86400")
