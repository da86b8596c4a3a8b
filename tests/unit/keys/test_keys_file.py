"""What a file of keys may say; each mistake is named, and no secret is repeated."""

import multiprocessing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from alignedserve.cli.keys.commands import add, check_keys, revoke, rotate, show_list
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.keys.edit import added, change_keys, new_secret, revoked, rotated, secret_row
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.keys.file import KeyRow, parse_keys, read_keys, render_keys, ring_of
from alignedserve.keys.ring import CurrentKeys, KeyRing, digest_of, owner_of
from alignedserve.keys.watch import KeysFile, KeysWatch

NOW = datetime(2026, 11, 25, tzinfo=UTC)
NOW_S = NOW.timestamp()
DIGEST = digest_of("secret-of-a").hex()


def row(name: str, secret: str, **fields: object) -> KeyRow:
    return msgspec.convert({"name": name, "secrets": [{"sha256": digest_of(secret).hex()}], **fields}, KeyRow)


def keys_file(folder: Path, *rows: KeyRow) -> Path:
    path = folder / "keys.yaml"
    change_keys(path, lambda _: rows)
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keys: [{name: a}, {name: a}]", "two keys of the name a"),
        ("keys: [{name: a, weight: -1}]", "key a: weight: must be a number above 0"),
        ("keys: [{name: a, weight: 0}]", "key a: weight"),
        ("keys: [{name: a, weight: .nan}]", "key a: weight"),
        ("keys: [{name: a, weight: .inf}]", "key a: weight"),
        ("keys: [{name: a, wieght: 1}]", "key a: unknown field wieght"),
        (
            "keys: [{name: a, requests_per_minute: 0}]",
            "key a: requests_per_minute: must be a whole number of at least 1$",
        ),
        ("keys: [{name: a, priorities: 3}]", "key a: priorities: must be two whole numbers"),
        ("keys: [{tiers: [flex]}]", "key number 1: it lacks the field name$"),
        ("keys: [{name: a, open_requests: 10000000000000}]", "key a: open_requests"),
        ("keys: [{name: a, may_see_usage: 1}]", "key a: may_see_usage"),
        ("keys: [{name: a, tiers: [gold]}]", "key a: tiers must be some of default, priority, flex"),
        ("keys: [{name: a, tiers: []}]", "key a: tiers"),
        ("keys: [{name: a, default_tier: priority}]", "key a: default_tier must be one of its tiers"),
        ("keys: [{name: a, priorities: [5, 1]}]", "key a: priorities"),
        ("keys: [{name: a, priorities: [0, 5000]}]", "key a: priorities"),
        ("keys: [{name: '../a'}]", "key number 1: name: must be up to 64 letters"),
        ('keys: [{name: "a\\n"}]', "key number 1: name: must be up to 64 letters"),  # would begin a line of a log
        ("keys: [3]", "key number 1"),
        ("keys: [{name: a, secrets: [{sha256: SECRET}]}]", "key a: secrets.*sha256: must be a SHA-256, of 64 digits"),
        (
            f"keys: [{{name: a, secrets: [{{sha256: {DIGEST}, expires: 2027-01-01}}]}}]",
            "key a: .* must be a time with its zone",
        ),
        ("keys: [{name: a, tiers: flex}]", "key a: tiers: must be a list$"),
        ("keys: [{name: a, open_requests: many}]", "key a: open_requests: must be a whole number$"),
        ("keys: [{name: a, secrets: [SECRET]}]", r"key a: secrets\[0\]: must be a mapping of fields$"),
        (f"keys: [{{name: a, secrets: [{{sha256: {DIGEST}}}]}}, {{name: b, secrets: [{{sha256: {DIGEST}}}]}}]", "same"),
        ("", "it is empty"),
        ("# no key yet\n", "it is empty"),
        ("{}", "one list, keys"),
        ("keys:\n", "one list, keys"),
        ("kyes: []", "one list, keys"),
        ("keys: {a: 1}", "one list, keys"),
        ("keys: [", "no YAML: a mistake in line 2"),
        ("keys: [!!python/object/apply:os.system [ls]]", "no YAML"),
        ("[" * 5000, "no YAML"),
        ("[" * 200_000, "no YAML"),  # at which the parser in C would end the process
        ("keys: [{name: a}]\nkeys: []", "no YAML: a mistake in line 2"),
        ("keys: [{name: a, revoked: true, revoked: false}]", "no YAML: a mistake in line 1"),
    ],
)
def test_mistakes_are_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        parse_keys(text)
    assert "SECRET" not in str(refused.value)
    assert DIGEST not in str(refused.value)


def test_what_is_written_is_read_again() -> None:
    some = row("a", "1", tiers=["flex"], models=["m*"]), row("b.c-d_e", "2", weight=2.5, priorities=[-3, 3])
    rows = (*some, *(row(f"key-{number}", f"secret-{number}") for number in range(1200)))  # in several pieces
    assert parse_keys(render_keys(rows)) == rows
    assert [one.entry().name for one in parse_keys(render_keys(rows))] == [one.name for one in rows]
    assert parse_keys(render_keys(())) == ()


def test_a_key_is_urgent_only_if_the_file_says_so() -> None:
    entry = row("a", "1").entry()
    assert entry.tier_of("auto") == entry.tier_of("default") == "default"
    assert entry.tier_of("priority") is None
    assert entry.tier_of("fast") is None
    assert not entry.may_have_priority(-1)
    urgent = row("a", "1", tiers=["priority"]).entry()
    assert (urgent.tier_of("auto"), urgent.tier_of("fast"), urgent.tier_of("flex")) == ("priority", "priority", None)


def test_models_by_name_and_by_beginning() -> None:
    entry = KeyEntry("a", "a", models=("tiny", "qwen/*"))
    assert entry.may_use("tiny")
    assert entry.may_use("qwen/3")
    assert not entry.may_use("tiny2")
    assert entry.may_use("alias", "tiny")


def test_secrets_overlap_when_they_rotate() -> None:
    rows = rotated((row("a", "old"),), "a", secret_row("new", NOW, None), NOW, overlap_s=60.0)
    ring = ring_of((), rows)
    assert [ring.find(secret, NOW_S + 59.0) is not None for secret in ("old", "new")] == [True, True]
    assert [ring.find(secret, NOW_S + 60.0) is not None for secret in ("old", "new")] == [False, True]
    at_once = ring_of((), rotated(rows, "a", secret_row("last", NOW, None), NOW, overlap_s=0.0))
    assert [at_once.find(secret, NOW_S) is not None for secret in ("old", "new", "last")] == [False, False, True]


def test_a_revoked_key_keeps_its_name_and_what_it_stored() -> None:
    ring = ring_of((), revoked((row("a", "old", weight=3.0),), "a"))
    assert ring.find("old", NOW_S) is None
    assert ring.owned_by(owner_of("a")).weight == 3.0
    assert ring.named("a") is None
    assert KeyRing(("x",)).owned_by(owner_of("gone")).name == "gone"


def test_plain_keys_and_none_at_all() -> None:
    ring = KeyRing(("one", "two"))
    found = [ring.find(secret, NOW_S) for secret in ("one", "two", "three", None, "")]
    assert [entry is None for entry in found] == [False, False, True, True, True]
    assert KeyRing().find(None, NOW_S) is ANYONE
    assert ring_of((), ()).find(None, NOW_S) is None  # a file without keys lets in nobody


def test_unknown_and_taken_names_change_nothing(tmp_path: Path) -> None:
    path = keys_file(tmp_path, row("a", "1"))
    before = path.read_bytes()
    for change in (lambda rows: revoked(rows, "b"), lambda rows: added(rows, row("a", "2"))):
        with pytest.raises(ConfigError):
            change_keys(path, change)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


def _add(path: Path, number: int) -> None:
    change_keys(path, lambda rows: added(rows, row(f"key-{number}", new_secret())))


@pytest.mark.slow
def test_changes_at_once_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        pool.starmap(_add, [(path, number) for number in range(24)])
    assert len(read_keys(path)) == 24


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o644, 0o666])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = keys_file(tmp_path, row("a", "1"))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"open to others.*chmod 600"):
        read_keys(path)


async def test_a_bad_file_changes_nothing_and_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = keys_file(tmp_path, row("a", "1"))
    keys = CurrentKeys()
    watch = KeysWatch(keys, ("plain",), KeysFile(path))
    assert keys.ring.find("1", NOW_S) is None
    assert await watch.look()
    assert not await watch.look()
    path.write_text("")  # as an editor or a shell begins
    assert not await watch.look()
    path.write_text("keys: [{name: a, weight: -1}]")
    for _ in range(3):
        assert not await watch.look()
    assert keys.ring.find("1", NOW_S) is not None
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        f"the keys stay as they were: {path}: key a: weight: must be a number above 0, and 1000000 at most"
    ]
    path.unlink()
    for _ in range(2):
        assert not await watch.look()
    assert keys.ring.find("1", NOW_S) is not None
    keys_file(tmp_path, row("a", "2"))
    assert not await watch.look()
    assert await watch.look()
    assert [keys.ring.find(secret, NOW_S) is None for secret in ("1", "2", "plain")] == [True, False, False]
    assert not await watch.look()
    watch.read_again()
    assert not await watch.look()
    assert await watch.look()


def test_a_secret_that_ends_with_the_calendar_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = datetime.fromisoformat("9999-12-31T23:59:59-08:00")  # in UTC it is in no year
    secret = secret_row("secret-of-a", NOW, last)
    path = keys_file(tmp_path, msgspec.convert({"name": "a", "secrets": [msgspec.to_builtins(secret)]}, KeyRow))
    show_list(path, json_output=True)
    assert '"1, to 9999-12-31 00:00Z"' in capsys.readouterr().out


def test_the_list_of_keys_has_whole_names_in_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("alignedserve.cli.console.results", lambda: Console(width=60))
    show_list(keys_file(tmp_path, row("analysts-of-the-third-floor", "one")), json_output=False)
    assert " analysts-of-the-third-floor " in capsys.readouterr().out


def test_a_key_is_not_looked_for_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    """In another folder the missing file is named; "there is no such key" would be taken for done."""
    path = tmp_path / "keys.yaml"
    for command in (
        partial(revoke, path, "a"),
        partial(rotate, path, "a", "24h", None),
        partial(show_list, path, False),
    ):
        with pytest.raises(ConfigError, match=r"keys\.yaml: No such file or directory; --file names another"):
            command()
    assert not list(tmp_path.iterdir())  # no lock either
    with pytest.raises(
        ConfigError, match=r"No such file or directory; `alignedserve keys add NAME --file .*keys\.yaml`"
    ):
        check_keys(GatewayConfig(keys_file=str(path)))


def test_times_that_are_none_are_named_with_what_is_one(tmp_path: Path) -> None:
    path = keys_file(tmp_path, row("a", "one"))
    for given, named in (
        ("tomorrow", "90d, 12h or 2027-01-31"),
        ("2026-13-01", "90d"),
        ("2020-01-01", "in the future"),
    ):
        with pytest.raises(ConfigError, match=rf"--expires {given}: must be .*{named}"):
            add(path, "b", {}, given, False)
    with pytest.raises(ConfigError, match="--overlap soon: must be a time such as 24h, 7d or 0"):
        rotate(path, "a", "soon", None)


def test_what_a_key_has_loaded_is_changed_by_it_and_by_those_that_see_all() -> None:
    ring = ring_of(("plain",), [row("a", "a"), row("b", "b"), row("sees", "sees", may_see_usage=True)])
    a, b, sees, plain = (ring.find(secret, NOW_S) for secret in ("a", "b", "sees", "plain"))
    assert a is not None
    assert [key.may_change(a.owner) for key in (a, b, sees, plain, ANYONE) if key is not None] == [
        True, False, True, True, True,
    ]  # fmt: skip
    assert b is not None
    assert b.may_change("")  # loaded before it was noted by whom
