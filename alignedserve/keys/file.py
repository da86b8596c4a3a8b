"""Reads keys.yaml: names, digests of secrets, rights and limits; every mistake is named, and no secret is repeated.

A file that `alignedserve keys` writes has one key a line, as JSON, which is YAML too: 10 000 are read in a tenth of a
second. What is edited by hand may be any YAML.
"""

import os
import re
import stat
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import MAX_PRIORITY
from alignedserve.disk.plain_yaml import load_yaml, required_kind
from alignedserve.keys.entry import DEFAULT, FLEX, MAX_KEYS_BYTES, TIERS, KeyEntry
from alignedserve.keys.ring import KeyRing, KeySecret, owner_of

MAX_KEYS = 100_000
MAX_SECRETS = 8  # of one key
_TIERS = frozenset(TIERS)
_HEAD = "keys:\n"
_ROW = "- {"
_ROWS_AT_ONCE = 500  # decoded without a pause for other threads: some milliseconds

_Time = Annotated[datetime, msgspec.Meta(tz=True)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
_MEANT = {
    "Object contains ": "",
    "Object missing required field": "it lacks the field",
    "Expected int >=": "must be a whole number of at least",
    "Expected int <=": "must be a whole number of at most",
}
_RULES = {  # for the patterns and types that msgspec tells
    "name": "must be up to 64 letters, digits, dots, dashes and underscores, with a letter or digit first",
    "weight": "must be a number above 0, and 1000000 at most",
    "priorities": "must be two whole numbers, the smaller first",
    "sha256": "must be a SHA-256, of 64 digits 0-9 and a-f",
}


class SecretRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A secret of a key."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created: _Time | None = None
    expires: _Time | None = None  # None: never

    def secret(self) -> KeySecret:
        return KeySecret(bytes.fromhex(self.sha256), None if self.expires is None else self.expires.timestamp())


class KeyRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One key as the file has it. A key may be urgent only if the file says so."""

    name: Name
    secrets: Annotated[tuple[SecretRow, ...], msgspec.Meta(max_length=MAX_SECRETS)] = ()
    revoked: bool = False  # its secrets are refused; what it has stored stays
    default_tier: str | None = None
    tiers: tuple[str, ...] = (DEFAULT, FLEX)
    priorities: tuple[_Priority, _Priority] = (0, MAX_PRIORITY)  # from, to
    models: Annotated[tuple[_Model, ...], msgspec.Meta(max_length=1000)] | None = None  # None: all
    weight: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 1.0
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    open_requests: _Count | None = None
    enqueued_batch_tokens: _Count | None = None
    may_see_usage: bool = False  # of all keys

    def __post_init__(self) -> None:
        if not self.tiers or not _TIERS.issuperset(self.tiers):
            raise ValueError(f"tiers must be some of {', '.join(TIERS)}")
        if self.default_tier is not None and self.default_tier not in self.tiers:
            raise ValueError("default_tier must be one of its tiers")
        if self.priorities[0] > self.priorities[1]:
            raise ValueError(f"priorities {_RULES['priorities']}")

    def entry(self) -> KeyEntry:
        preferred = self.default_tier or (DEFAULT if DEFAULT in self.tiers else self.tiers[0])
        return KeyEntry(
            name=self.name,
            owner=owner_of(self.name),
            weight=self.weight,
            default_tier=preferred,
            tiers=frozenset(self.tiers),
            min_priority=self.priorities[0],
            max_priority=self.priorities[1],
            models=self.models,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            open_requests=self.open_requests,
            enqueued_batch_tokens=self.enqueued_batch_tokens,
            may_see_usage=self.may_see_usage,
            is_revoked=self.revoked,
        )

    def valid_secrets(self) -> tuple[KeySecret, ...]:
        return () if self.revoked else tuple(row.secret() for row in self.secrets)


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[Any]


def parse_keys(text: str) -> tuple[KeyRow, ...]:
    """Return the keys of a file's text. Raises ConfigError naming the key and the field."""
    rows = _plain_rows(text)
    if rows is None:
        rows = tuple(parse_row(item, number) for number, item in enumerate(_items(text), start=1))
    if len(rows) > MAX_KEYS:
        raise ConfigError(f"there are more than {MAX_KEYS} keys")
    seen: set[str] = set()
    secrets: dict[str, str] = {}
    for row in rows:
        if row.name in seen:
            raise ConfigError(f"there are two keys of the name {row.name}")
        seen.add(row.name)
        for secret in row.secrets:
            other = secrets.setdefault(secret.sha256, row.name)
            if other != row.name:
                raise ConfigError(f"keys {other} and {row.name} have the same secret")
    return rows


def render_keys(rows: Sequence[KeyRow]) -> str:
    """Return the text of a file with these keys, one a line."""
    lines = (f"- {msgspec.json.encode(row).decode()}\n" for row in rows)
    return "# Keys of AlignedServe's clients, written by `alignedserve keys`. Secrets are kept as digests.\n" + (
        _HEAD + "".join(lines) if rows else "keys: []\n"
    )


def _plain_rows(text: str) -> tuple[KeyRow, ...] | None:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if len(lines) < 2 or lines[0] != _HEAD.rstrip() or not all(line.startswith(_ROW) for line in lines[1:]):
        return None
    rows: list[KeyRow] = []
    try:
        for start in range(1, len(lines), _ROWS_AT_ONCE):
            some = ",".join(line[2:] for line in lines[start : start + _ROWS_AT_ONCE])
            rows += msgspec.json.decode(f"[{some}]", type=list[KeyRow])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    return tuple(rows)


def _items(text: str) -> list[Any]:
    try:
        loaded = load_yaml(text)
        items = None if loaded is None else msgspec.convert(loaded, _Document).keys
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ConfigError(f"it is no YAML: a mistake{line}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, msgspec.ValidationError):
            raise ConfigError(f"it must have one list, keys: {_words(error)}") from error
        raise ConfigError("it is no YAML") from error
    if items is None:  # a file that is just being written begins so, too
        raise ConfigError("it is empty; a file without any key has `keys: []`")
    return items


def parse_row(item: Any, number: int = 1) -> KeyRow:
    """Return one key of plain values. Raises ConfigError naming it and the field."""
    try:
        return msgspec.convert(item, KeyRow)
    except msgspec.ValidationError as error:
        name = item.get("name") if isinstance(item, dict) else None
        is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)
        which = f"key {name}" if is_name else f"key number {number}"
        raise ConfigError(f"{which}: {_words(error)}") from error


def _words(error: msgspec.ValidationError) -> str:
    words, _, where = str(error).replace("`", "").partition(" - at $.")
    words = _RULES.get(where.rpartition(".")[2], words)
    for phrase, meant in _MEANT.items():
        words = words.replace(phrase, meant)
    words = required_kind(words) or words
    return f"{where}: {words}" if where else words


def read_keys(path: Path) -> tuple[KeyRow, ...]:
    """Return the keys of a file. Raises ConfigError naming the file, the key and the field.

    Nobody but its owner (and a group, to read) may open it: who can write it can be anyone.
    """
    try:
        with path.open("rb") as file:
            _check_owner(path, os.fstat(file.fileno()))
            raw = file.read(MAX_KEYS_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'cannot be read'}") from error
    if len(raw) > MAX_KEYS_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_KEYS_BYTES >> 20} MiB")
    try:
        return parse_keys(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is no UTF-8") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no file")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} belongs to another user")
    if status.st_mode & 0o037:
        raise ConfigError(
            f"{path} is open to others (mode {status.st_mode & 0o777:o}); make it private: chmod 600 {path}"
        )


def ring_of(plain: Sequence[str], rows: Sequence[KeyRow] | None) -> KeyRing:
    """Return the ring of plain keys and of the file's. `rows`: None: there is no file."""
    if rows is None:
        return KeyRing(plain)
    return KeyRing(plain, ((row.entry(), row.valid_secrets()) for row in rows))
