"""All keys at one moment: finds a secret's entry, and the entry to which stored things belong."""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from alignedserve.keys.entry import ANYONE, NAMED, KeyEntry


class KeySecret(msgspec.Struct, frozen=True, gc=False):
    """One secret of a key, known by its digest alone. Secrets have 256 random bits: a digest cannot be guessed."""

    digest: bytes  # SHA-256
    expires_s: float | None = None  # Unix time; None: never

    def is_valid(self, now: float) -> bool:
        return self.expires_s is None or now < self.expires_s


class KeyRing:
    """Finds entries. Never changed: other keys are another ring."""

    def __init__(
        self, plain: Sequence[str] = (), entries: Iterable[tuple[KeyEntry, tuple[KeySecret, ...]]] | None = None
    ) -> None:
        """`plain`: keys without limits of their own. `entries`: None: there is no file of keys."""
        self._secrets: dict[bytes, tuple[KeyEntry, KeySecret]] = {}
        self._by_owner: dict[str, KeyEntry] = {}
        self.is_open = not plain and entries is None  # anyone may call
        for entry, secrets in entries or ():
            self._by_owner[entry.owner] = entry
            for secret in secrets:
                self._secrets[secret.digest] = (entry, secret)
        for key in plain:
            digest = digest_of(key)
            entry = plain_entry(digest)
            self._by_owner[entry.owner] = entry
            self._secrets[digest] = (entry, KeySecret(digest))

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def owners(self) -> tuple[str, ...]:
        return (ANYONE.owner,) if self.is_open else tuple(self._by_owner)

    def find(self, secret: str | None, now: float) -> KeyEntry | None:
        """Return the entry of a secret at this Unix time; None: it is no valid one.

        It is looked up by its digest: what the time taken tells of digests helps nobody to find a secret.
        """
        if self.is_open:
            return ANYONE
        row = self._secrets.get(digest_of(secret)) if secret is not None else None
        return row[0] if row is not None and row[1].is_valid(now) else None

    def named(self, name: str) -> KeyEntry | None:
        """Return the entry of this name in the file; None: it is not there, or revoked."""
        entry = self._by_owner.get(owner_of(name))
        return None if entry is None or entry.is_revoked else entry

    def owned_by(self, owner: str) -> KeyEntry:
        """Return the entry to whom stored things belong: a plain one of its name where it is gone by now."""
        known = self._by_owner.get(owner)
        if known is not None or owner == ANYONE.owner:
            return known or ANYONE
        return KeyEntry(owner.removeprefix(NAMED) if owner.startswith(NAMED) else f"key-{owner[:8]}", owner)


class CurrentKeys:
    """The keys of a process, which may be others from one request to the next."""

    def __init__(self, ring: KeyRing | None = None) -> None:
        self.ring = ring or KeyRing()


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def owner_of(name: str) -> str:
    """Return the owner of what is stored for the entry of this name: it stays when its secrets change."""
    return NAMED + name


def plain_entry(digest: bytes) -> KeyEntry:
    """Return the entry of a key of ALIGNEDSERVE_API_KEYS: all rights, independent of restarts and of other keys."""
    owner = hashlib.sha256(b"owner" + digest).hexdigest()[:32]
    return KeyEntry(f"key-{owner[:8]}", owner)
