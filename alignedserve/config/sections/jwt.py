"""The issuers whose tokens (JWT) stand for clients' keys."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from typing_extensions import override

from alignedserve.config.sections.base import Section
from alignedserve.core.errors import ConfigError

# With public keys alone: what verifies a token cannot make one.
ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_ISSUERS = 16


class JwtIssuer(Section, frozen=True):
    """One issuer, and what its tokens must say."""

    issuer: str  # as its tokens name it (iss)
    audience: tuple[str, ...]  # of which they name one (aud): this service
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
    return parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK)
