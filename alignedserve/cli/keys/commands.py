"""The commands of `alignedserve keys`."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from alignedserve.cli.console import counted, notes, print_json, print_table, results
from alignedserve.config.environment import API_KEYS_VARIABLE, api_keys
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.plugins import load_plugin
from alignedserve.keys.edit import added, change_keys, new_secret, revoked, rotated, secret_row
from alignedserve.keys.file import KeyRow, parse_row, read_keys

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 100 * 366 * 86400
_LATEST = datetime(9999, 12, 31, tzinfo=UTC)  # shown of what ends later: its time in UTC may be in no year
_EXPIRES = "must be a time such as 90d, 12h or 2027-01-31"
_LIMITS = {
    "requests_per_minute": "{}/min",
    "tokens_per_minute": "{} tokens/min",
    "open_requests": "{} open",
    "enqueued_batch_tokens": "{} batch tokens",
}


def add(path: Path, name: str, fields: Mapping[str, Any], expires: str | None, has_no_secret: bool) -> None:
    if has_no_secret and expires is not None:
        raise ConfigError("--expires is of a secret; with --no-secret there is none")
    now, secret = _now(), new_secret()
    named = dict(fields)
    if "priorities" in named:
        match = re.fullmatch(r"(-?\d{1,4}):(-?\d{1,4})", named["priorities"], re.ASCII)
        if match is None:
            raise ConfigError("--priorities must be FROM:TO, such as 0:100")
        named["priorities"] = [int(match[1]), int(match[2])]
    secrets = () if has_no_secret else (secret_row(secret, now, _end(expires, now)),)
    row = msgspec.structs.replace(parse_row(named | {"name": name}), secrets=secrets)
    change_keys(path, lambda rows: added(rows, row))
    if has_no_secret:
        notes().print(f"Key {name} is in {path}, for tokens alone.", soft_wrap=True)
    else:
        _show(secret, f"Key {name} is in {path}.")


def rotate(path: Path, name: str, overlap: str, expires: str | None) -> None:
    _require(path)
    now, secret = _now(), new_secret()
    row = secret_row(secret, now, _end(expires, now))
    overlap_s = _seconds("--overlap", overlap, "must be a time such as 24h, 7d or 0")
    change_keys(path, partial(rotated, name=name, secret=row, now=now, overlap_s=overlap_s))
    until = (now + timedelta(seconds=overlap_s)).isoformat(" ", "minutes")
    _show(secret, f"Former secrets of {name} are good until {until}." if overlap_s else "Former secrets have ended.")


def revoke(path: Path, name: str) -> None:
    _require(path)
    change_keys(path, partial(revoked, name=name))
    notes().print(f"Key {name} is revoked. Gateways refuse it within a second; batches that it has created go on.")


def show_list(path: Path, json_output: bool) -> None:
    _require(path)
    rows, now = read_keys(path), _now()
    if json_output:
        print_json([_view(row, now) for row in rows])
        return
    table = Table(title=f"{counted(len(rows), 'key')} in {path}", title_justify="left")
    for heading in ("name", "secrets", "tiers", "priorities", "models", "weight", "limits and rights"):
        table.add_column(heading)
    for row in rows:
        entry = row.entry()
        tiers = [entry.default_tier, *(tier for tier in row.tiers if tier != entry.default_tier)]
        models = "all" if row.models is None else "\n".join(row.models)
        priorities = f"{row.priorities[0]} to {row.priorities[1]}"
        limits = [form.format(value) for name, form in _LIMITS.items() if (value := getattr(row, name)) is not None]
        shown = (row.name, _secrets(row, now), ", ".join(tiers), priorities, models, f"{row.weight:g}")
        limits += ["sees all usage"] * row.may_see_usage
        table.add_row(*map(escape, shown), "\n".join(limits) or "none")
    print_table(table)


def _require(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; --file names another, and `keys add` makes one") from error


def _view(row: KeyRow, now: datetime) -> dict[str, Any]:
    view: dict[str, Any] = msgspec.to_builtins(row)
    view.pop("secrets", None)
    return view | {"secrets": _secrets(row, now)}


def _secrets(row: KeyRow, now: datetime) -> str:
    if row.revoked:
        return "revoked"
    valid = [secret for secret in row.secrets if secret.expires is None or secret.expires > now]
    ends = [min(secret.expires, _LATEST) for secret in valid if secret.expires is not None]
    if not valid:
        return "expired" if row.secrets else "none"
    until = f", to {min(ends).astimezone(UTC):%Y-%m-%d %H:%M}Z" if ends else ""
    return f"{len(valid)}{until}"


def _show(secret: str, remark: str) -> None:
    results().print(secret, soft_wrap=True, markup=False)
    notes().print(f"{remark} The secret above is shown this once: only its digest is kept.", soft_wrap=True)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _end(text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}.*", text):
        try:
            ends = datetime.fromisoformat(text)
        except ValueError as error:
            raise ConfigError(f"--expires {text}: {_EXPIRES}") from error
        ends = ends.replace(tzinfo=UTC) if ends.tzinfo is None else ends
    else:
        ends = now + timedelta(seconds=_seconds("--expires", text, _EXPIRES))
    if ends <= now:
        raise ConfigError(f"--expires {text}: must be in the future")
    return ends


def _seconds(option: str, text: str, rule: str) -> float:
    match = re.fullmatch(r"(\d{1,10})([smhd]?)", text, re.ASCII)
    seconds = int(match[1]) * _UNITS.get(match[2], 1) if match else _LONGEST_S + 1
    if seconds > _LONGEST_S:
        raise ConfigError(f"{option} {text}: {rule}")
    return float(seconds)


def warn_of_strangers(config: GatewayConfig) -> None:
    """Say so where others than this host reach the gateways, and need no key. Raises ConfigError."""
    if not api_keys() and not config.keys_file and not config.is_local:
        notes().print(f"warning: anyone who reaches the gateways may use them; set {API_KEYS_VARIABLE}", soft_wrap=True)


def check_keys(config: GatewayConfig) -> None:
    """Raise ConfigError for a file of keys that cannot be used, and for issuers without the plugin."""
    path = config.keys_path
    try:
        if path is not None:
            read_keys(path)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ConfigError(f"{error}; `alignedserve keys add NAME --file {path}` makes it") from error
        raise
    for issuer in config.jwt:
        load_plugin("jwt").check_file(issuer)


def show_keys(config: GatewayConfig) -> None:
    """Say how the file is, on SIGHUP: every process reads it by itself within a second."""
    path = config.keys_path
    if path is None:
        return
    try:
        notes().print(f"{path}: {counted(len(read_keys(path)), 'key')}, good within a second", soft_wrap=True)
    except ConfigError as error:
        notes().print(f"error: the keys stay as they were: {error}", soft_wrap=True, markup=False)
