"""The section of the HTTP gateways."""

import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from typing_extensions import override

from alignedserve.config.sections.base import MIB, Section
from alignedserve.config.sections.batches import LONGEST_LIFETIME_S
from alignedserve.core.errors import ConfigError
from alignedserve.core.picture import MAX_PICTURES, MAX_PIXELS
from alignedserve.core.request import Slo

# With public keys alone: what verifies a token cannot make one.
ALGORITHMS = (*("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), *("ES256", "ES384", "ES512", "EdDSA"))
_MAX_ISSUERS = 16


class JwtIssuer(Section, frozen=True):
    """One issuer, and what its tokens must say."""

    issuer: str  # iss of the tokens
    audience: tuple[str, ...]  # aud of the tokens, one of these: this service
    jwks: str  # its public keys: a URL with https (http: of this host alone), or the absolute path of a file
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    claim: str = "sub"  # whose value says which key of keys.yaml a token stands for
    keys: dict[str, str] | None = None  # the key's name by that value; None: the value is the name
    required_claims: tuple[str, ...] = ()  # beside iss, aud, exp and the one above
    leeway_s: float = 30.0  # between the clocks
    refresh_s: float = 300.0  # after which its keys are fetched again

    def __post_init__(self) -> None:
        self._require(bool(self.issuer), "issuer", "must be what its tokens name as iss")
        self._require(bool(self.audience) and all(self.audience), "audience", "must name what tokens name as aud")
        unknown = [name for name in self.algorithms if name not in ALGORITHMS]
        are_known = bool(self.algorithms) and not unknown
        self._require(are_known, "algorithms", f"must be some of {', '.join(ALGORITHMS)}")
        self._require(bool(self.claim), "claim", "must be the name of a claim")
        self._require(0.0 <= self.leeway_s <= 300.0, "leeway_s", "must be between 0 and 300")
        self._require(10.0 <= self.refresh_s <= 86_400.0, "refresh_s", "must be between 10 and 86400")
        self._require(
            self.jwks.startswith("/") or _is_safe(self.jwks),
            "jwks",
            "must begin with https:// (http:// only for this host itself), or be the absolute path of a file",
        )

    @classmethod
    @override
    def _section_name(cls) -> str:
        return "gateway.jwt"

    @property
    def path(self) -> str | None:
        """Return the file of its public keys; None: they have a URL."""
        return self.jwks if self.jwks.startswith("/") else None


def check_issuers(issuers: Sequence[JwtIssuer]) -> None:
    names = [issuer.issuer for issuer in issuers]
    if len(names) > _MAX_ISSUERS or len(set(names)) < len(names):
        raise ConfigError(f"gateway.jwt must be at most {_MAX_ISSUERS} issuers, each once")


def _is_safe(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or parts.username is not None or parts.fragment:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


AUTO, NONE = "auto", "none"  # of default objectives
_ORIGIN = re.compile(r"\*|https?://[^/\s,]+", re.ASCII)
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)
_LABEL = "[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_HOST = re.compile(rf"(\*\.)?({_LABEL}\.)*[a-z]([a-z0-9-]*[a-z0-9])?(:[1-9][0-9]{{0,4}})?", re.ASCII)  # no address


HEAD, HOST = KEYS_FROM = ("head", "host")
NO_BODIES, REDACTED_BODIES, FULL_BODIES = REQUEST_LOGS = ("none", "redacted", "full")


class GatewayConfig(Section, frozen=True):
    """HTTP gateway."""

    host: str = "127.0.0.1"  # to listen on; node, on several hosts: the address of each gateway's own
    port: int = 8000  # to listen on
    count: int = 1  # gateways; the n-th of a host listens on port + n; when unset one on each node
    shared_port: bool = False  # all gateways of a host listen on `port`; one that is lost costs its connections alone
    # Both or neither, in PEM, on every host with a gateway: HTTPS alone, and read again when they change.
    tls_certificate: str | None = None  # file of the certificate, and of those between it and a known authority
    tls_key: str | None = None  # file of its key, without a pass phrase
    # Of one gateway, idle ones too; fewer where the process may open fewer files. Best effort has 3/4 of both.
    max_connections: int = 8192
    max_connections_per_address: int = 2048  # a proxy before the gateway is one address
    max_header_bytes: int = 65_536  # of one request
    header_timeout_s: float = 10.0  # from the first byte of a request, or of the connection, to the last of its headers
    min_body_bytes_per_s: int = 256  # over 10 s, while a body is awaited
    max_body_bytes: int = 4 * MIB  # of one body, unpacked; uploaded files have limits of their own (batches)
    max_json_depth: int = 32  # of one body
    max_json_containers: int = 4096  # objects and lists in one body: messages, parts, tools and what is in them
    max_json_values: int = 1_000_000  # in one body, such as token ids
    max_choices: int = 16  # the largest n
    max_stop_strings: int = 16  # of one request
    max_pictures: int = 8  # of one request
    max_picture_bytes: int = 8 * MIB  # of each; max_body_bytes bounds all of a request, as base64
    max_picture_pixels: int = 1 << 25  # of each
    picture_hosts: tuple[str, ...] = ()  # of which URLs are fetched, as images.example, *.example:8443
    picture_fetch_timeout_s: float = 5.0  # of one URL, redirects and waiting included
    max_picture_redirects: int = 3  # to the same host; none are followed to others
    max_concurrent_requests: int = 1024  # of one gateway, real-time ones; best effort takes none of their places
    max_best_effort_requests: int = 8192  # of one gateway
    access_log: bool = False  # a line for every answer: who asked for what, how it ended, how long it took
    request_log: str = "none"  # a line for every body: none, redacted (texts by their lengths), or full
    max_request_log_bytes: int = 4096  # of a body that is logged in full; a longer one is by its beginning
    log_steps: bool = False  # every process logs a line for each message about one request
    requests_per_minute: int | None = None  # per key that has no limit of its own; 429 above
    keys_file: str | None = None  # keys.yaml: rights and limits of each client's key; read again when it changes
    keys_from: str = "head"  # on other hosts than the head's: its file, through the state server; host: their own file
    jwt: tuple[JwtIssuer, ...] = ()  # whose tokens stand for keys of that file
    strict: bool = False  # unknown fields are refused; otherwise ignored, and named by a header of the response
    cors_origins: tuple[str, ...] = ()  # pages of these origins may call it, such as https://chat.example; "*": all
    host_names: tuple[
        str, ...
    ] = ()  # it answers to, beside localhost and addresses; others: 403 on loopback, without keys
    # Objectives of real-time requests that name none: seconds, "auto" (from the speed of the machine) or "none".
    default_ttft_s: float | str = "auto"  # to the first token
    default_tpot_s: float | str = "auto"  # between tokens, on average
    first_token_timeout_s: float = 120.0  # accepted but silent: the request fails
    load_patience_s: float = 300.0  # of a request that names a model which sleeps, until it is loaded
    token_timeout_s: float = 60.0  # longest silence within an answer; ten times that while others are served
    best_effort_timeout_s: float = 3600.0  # longest silence of a best-effort request, or its deadline and a tenth more
    drain_s: float = 60.0  # for answers that run when it is told to end (SIGTERM, Ctrl-C); 0: it ends at once
    max_responses_bytes: int = 100_000_000  # stored responses of one key; its oldest ones make room
    max_response_events_bytes: int = 4_000_000  # of a response in the background; its oldest events make room
    max_events_bytes: int = 100_000_000  # events of all of them of one key; the oldest make room
    max_response_turns: int = 256  # stored responses that one more may continue
    response_lifetime_s: float = 30 * 24 * 3600.0  # of a stored response

    @property
    def num_ports(self) -> int:
        """Return how many ports the gateways need where they are on one host, from `port` on."""
        return 1 if self.shared_port else self.count

    @property
    def is_local(self) -> bool:
        """Return whether it listens on loopback alone."""
        return _is_loopback(self.host)

    @property
    def scheme(self) -> str:
        return "https" if self.tls_certificate else "http"

    @property
    def keys_path(self) -> Path | None:
        return None if self.keys_file is None else Path(self.keys_file).expanduser().absolute()

    @property
    def named_slo(self) -> Slo:
        """Return the default objectives that are set to seconds; whoever knows the machine has those that are auto."""
        return Slo(_seconds(self.default_ttft_s), _seconds(self.default_tpot_s))

    def __post_init__(self) -> None:
        self._require(bool(self.host.strip()), "host", "must be an address, or a name that has one")
        self._require(0 < self.port < 65536, "port", "must be a TCP port")
        self._require(1 <= self.count <= 64, "count", "must be between 1 and 64")
        self._require(self.port + self.num_ports <= 65536, "count", "needs as many ports from gateway.port on")
        for name, other in (("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")):
            is_whole = getattr(self, name) is not None or getattr(self, other) is None
            self._require(is_whole, name, f"must name a file where gateway.{other} does")
            path = getattr(self, name)
            self._require(
                path is None or path.startswith("/"),
                name,
                "must be an absolute path: gateways have folders of their own",
            )
        self._require_positive("max_connections", "max_connections_per_address", "header_timeout_s")
        self._require(self.max_header_bytes >= 1024, "max_header_bytes", "must be at least 1024")
        self._require(self.min_body_bytes_per_s >= 0, "min_body_bytes_per_s", "must not be negative")
        self._require(self.request_log in REQUEST_LOGS, "request_log", f"must be one of {', '.join(REQUEST_LOGS)}")
        self._require(1 <= self.max_request_log_bytes <= MIB, "max_request_log_bytes", "must be between 1 and 1048576")
        self._require(self.keys_from in KEYS_FROM, "keys_from", f"must be one of {', '.join(KEYS_FROM)}")
        self._require(
            not self.jwt or self.keys_file is not None,
            "keys_file",
            "must be set with gateway.jwt: it says what clients may",
        )
        check_issuers(self.jwt)
        self._require_positive("max_body_bytes", "max_choices", "max_stop_strings")
        self._check_pictures()
        self._require_positive("max_json_depth", "max_json_containers", "max_json_values")
        self._require_positive("max_concurrent_requests", "first_token_timeout_s", "token_timeout_s")
        self._require_positive("load_patience_s")
        for objective in ("default_ttft_s", "default_tpot_s"):
            self._require(
                _is_objective(getattr(self, objective)), objective, "must be auto, none or seconds up to 3600"
            )
        self._require_positive("max_best_effort_requests", "best_effort_timeout_s")
        self._require_positive("max_responses_bytes", "max_response_turns")
        is_lifetime = 0.0 < self.response_lifetime_s <= LONGEST_LIFETIME_S
        self._require(is_lifetime, "response_lifetime_s", f"must be above 0 and at most {LONGEST_LIFETIME_S:.0f}")
        self._require_positive("max_response_events_bytes", "max_events_bytes")
        self._require(0.0 <= self.drain_s <= 86400.0, "drain_s", "must be between 0 and 86400 seconds")
        are_origins = all(_ORIGIN.fullmatch(origin) for origin in self.cors_origins)
        self._require(are_origins, "cors_origins", "must be origins such as https://chat.example, or *")
        are_names = all(_NAME.fullmatch(name) for name in self.host_names)
        self._require(are_names, "host_names", "must be names in lower case such as chat.example, without a port")
        self._require(
            self.requests_per_minute is None or self.requests_per_minute > 0, "requests_per_minute", "must be above 0"
        )

    def _check_pictures(self) -> None:
        self._require(0 <= self.max_pictures <= MAX_PICTURES, "max_pictures", f"must be at most {MAX_PICTURES}")
        self._require_positive("max_picture_bytes", "max_picture_pixels")
        self._require(self.max_picture_pixels <= MAX_PIXELS, "max_picture_pixels", f"must be at most {MAX_PIXELS}")
        are_hosts = all(_HOST.fullmatch(host) for host in self.picture_hosts)
        self._require(are_hosts, "picture_hosts", "must be names of hosts such as images.example or *.images.example")
        self._require(0.0 < self.picture_fetch_timeout_s <= 60.0, "picture_fetch_timeout_s", "must be at most 60 s")
        self._require(0 <= self.max_picture_redirects <= 10, "max_picture_redirects", "must be between 0 and 10")


def _is_objective(value: float | str) -> bool:
    return value in (AUTO, NONE) if isinstance(value, str) else 0.0 < value <= 3600.0


def _seconds(value: float | str) -> float | None:
    return None if isinstance(value, str) else value
