"""Changes keys.yaml: one change at a time, written whole or not at all; secrets are made here and shown once."""

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from alignedserve.core.errors import ConfigError
from alignedserve.disk.durable import write_durably
from alignedserve.keys.file import MAX_SECRETS, KeyRow, SecretRow, parse_keys, read_keys, render_keys
from alignedserve.keys.ring import digest_of

_PREFIX = "sk-as-"  # scanners of leaked secrets can be taught to find it
_SECRET_BYTES = 32

Rows = tuple[KeyRow, ...]


def new_secret() -> str:
    """Return a new secret of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def change_keys(path: Path, change: Callable[[Rows], Sequence[KeyRow]]) -> None:
    """Replace the file's keys by what `change` makes of them. Raises ConfigError; then the file is as it was."""
    with _locked(path):
        rows = read_keys(path) if path.exists() else ()
        text = render_keys(change(rows))
        parse_keys(text)  # what is written can be read
        try:
            write_durably(path, text.encode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def added(rows: Rows, row: KeyRow) -> Rows:
    """Return the keys with one more. Raises ConfigError if its name is taken."""
    if any(other.name == row.name for other in rows):
        raise ConfigError(f"there is a key of the name {row.name}; `keys rotate` gives it another secret")
    return (*rows, row)


def revoked(rows: Rows, name: str) -> Rows:
    """Return the keys without the secrets of one. Raises ConfigError if there is none of this name."""
    return _replaced(rows, name, lambda row: msgspec.structs.replace(row, revoked=True, secrets=()))


def rotated(rows: Rows, name: str, secret: SecretRow, now: datetime, overlap_s: float) -> Rows:
    """Return the keys with a new secret for one, whose others end after `overlap_s`. Raises ConfigError."""

    def rotate(row: KeyRow) -> KeyRow:
        ends = now + timedelta(seconds=overlap_s)
        ending = (_ending(known, ends) for known in row.secrets if known.expires is None or known.expires > now)
        others = tuple(known for known in ending if known.expires is None or known.expires > now)
        if len(others) >= MAX_SECRETS:
            raise ConfigError(f"key {name} has {MAX_SECRETS} secrets that have not expired")
        return msgspec.structs.replace(row, revoked=False, secrets=(*others, secret))

    return _replaced(rows, name, rotate)


def secret_row(secret: str, created: datetime, expires: datetime | None) -> SecretRow:
    return SecretRow(digest_of(secret).hex(), created, expires)


def _ending(secret: SecretRow, ends: datetime) -> SecretRow:
    is_sooner = secret.expires is not None and secret.expires <= ends
    return secret if is_sooner else msgspec.structs.replace(secret, expires=ends)


def _replaced(rows: Rows, name: str, change: Callable[[KeyRow], KeyRow]) -> Rows:
    if all(row.name != name for row in rows):
        raise ConfigError(f"there is no key of the name {name}")
    return tuple(change(row) if row.name == name else row for row in rows)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{lock} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
