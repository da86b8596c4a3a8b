"""Tokens (JWT) in place of keys: which stand for a key, what refusals say, when whose keys are fetched."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from jwt.algorithms import RSAAlgorithm
from jwt.warnings import InsecureKeyLengthWarning

from alignedserve.api.errors import Unauthorized, Unavailable
from alignedserve.cli.keys import commands
from alignedserve.cli.keys.commands import check_keys
from alignedserve.config.loading import config_of
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.plugins import load_plugin
from alignedserve.gateway import services
from alignedserve.gateway.services import build_services
from alignedserve.keys.file import KeyRow, ring_of
from plugins.jwt import issuer_keys, verifier
from plugins.jwt.issuer_keys import AGAIN_S, MAX_KEY_SET_BYTES, IssuerKeys, parse_key_set
from plugins.jwt.verifier import MAX_TOKEN_LEN, TokenVerifier
from tests.gateway.keys.token_support import (
    AUDIENCE,
    ISSUER,
    Published,
    confused_token,
    issuer,
    jwk,
    key_set,
    published,
    rsa_key,
    token,
)
from tests.gateway.support import Gateway, error_of, gateway


def now(after_s: int = 0) -> int:
    """Return the Unix time of a moment from now: of the test, which may run minutes after it was read."""
    return int(time.time()) + after_s


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def jwks(tmp_path: Path) -> str:
    """A file of the keys `one`, for RSA, and `ec`."""
    path = tmp_path / "jwks.json"
    path.write_bytes(key_set("one", "ec"))
    return str(path)


def verifying(jwks: str, clock: Clock | None = None, **fields: Any) -> TokenVerifier:
    """A verifier of one issuer; `clock`: of how often its keys are fetched."""
    make = IssuerKeys if clock is None else lambda one: IssuerKeys(one, clock=clock)
    return TokenVerifier([issuer(jwks, **fields)], make)


# --- at the door


@asynccontextmanager
async def served(jwks: str, **fields: Any) -> AsyncIterator[Gateway]:
    async with gateway(keys_file="/not/read/here", jwt=(issuer(jwks, **fields),)) as running:
        running.services.keys.ring = ring_of((), [KeyRow("team-a", tiers=("flex",)), KeyRow("gone", revoked=True)])
        yield running


async def ask(running: Gateway, presented: str, header: str = "authorization") -> Any:
    value = f"Bearer {presented}" if header == "authorization" else presented
    return await running.chat(headers={header: value})


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_token_has_the_rights_of_its_key(jwks: str, header: str) -> None:
    async with served(jwks) as running:
        for presented in (token(), token("ec", "ES256", aud=["other", AUDIENCE])):
            response = await ask(running, presented, header)
            assert response.status_code == 200
            assert response.json()["service_tier"] == "flex"  # as its key's default is


async def test_a_token_of_a_key_that_is_revoked_or_gone_is_refused(jwks: str) -> None:
    async with served(jwks) as running:
        for name in ("gone", "nobody"):
            error = error_of(await ask(running, token(sub=name)), 401)
            assert error["message"] == "The token stands for a key that is not here, or that is revoked."
        assert (await ask(running, token())).status_code == 200
        running.services.keys.ring = ring_of((), [KeyRow("team-a", revoked=True)])
        error_of(await ask(running, token()), 401)  # which was verified before


async def test_while_an_issuers_keys_are_unknown_tokens_wait(tmp_path: Path) -> None:
    async with served(str(tmp_path / "nothing")) as running:
        response = await ask(running, token())
        error_of(response, 503)
        assert response.headers["retry-after"]


async def test_without_issuers_a_token_is_no_key() -> None:
    async with gateway(api_keys=("plain",)) as running:
        assert "API key is required" in error_of(await ask(running, token()), 401)["message"]


# --- what a token must be


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: token(exp=now(-60)), "has expired"),
        (lambda: token(nbf=now(600)), "is not valid yet"),
        (lambda: token(iat=now(600)), "is not valid yet"),
        (lambda: token(aud="SECRET"), "is for another audience"),
        (lambda: token(aud=None), "lacks the claim aud"),
        (lambda: token(exp=None), "lacks the claim exp"),
        (lambda: token(exp="SECRET"), "cannot be read"),
        (lambda: token(exp=1e400), "cannot be read"),
        (lambda: token(org=None), "lacks the claim org"),
        (lambda: token(iss="https://SECRET.example"), "is of an issuer that is not known here"),
        (lambda: token(sub=["team-a", "SECRET"]), "cannot be read"),
        (lambda: token("two"), "is signed with a key that its issuer does not publish"),
        (lambda: token("two", header={"kid": "one"}), "has a signature that is not its issuer's"),
        (lambda: token(algorithm="PS256"), "is signed by an algorithm that is not allowed"),
        (lambda: token(algorithm="RS512"), "is signed by an algorithm that is not allowed"),
        (lambda: token("ec", "ES256", {"kid": "one"}), "is signed with a key that its issuer does not publish"),
        (lambda: confused_token("HS256"), "is signed by an algorithm that is not allowed"),
        (lambda: confused_token("none"), "is signed by an algorithm that is not allowed"),
        (lambda: confused_token("RS256"), "has a signature that is not its issuer's"),
        (lambda: token(header={"typ": "logout+jwt"}), "is of a kind that is not served here"),
        (lambda: token(header={"crit": ["SECRET"], "SECRET": 1}), "cannot be read"),
        (lambda: token() + "A", "has a signature that is not its issuer's"),
        (lambda: "SECRET.SECRET.SECRET", "cannot be read"),
        (lambda: "..", "cannot be read"),
        (lambda: token(more="x" * MAX_TOKEN_LEN), "is too long"),
    ],
)
async def test_what_is_no_good_token_is_named_and_not_repeated(jwks: str, make: Callable[[], str], words: str) -> None:
    needs = ("org",) if "org" in words else ()
    with pytest.raises(Unauthorized, match=words) as refused:
        await verifying(jwks, required_claims=needs).key_name(make())
    assert "SECRET" not in str(refused.value)


async def test_clocks_may_differ_by_the_leeway(jwks: str) -> None:
    for presented in (token(exp=now(-60)), token(nbf=now(60))):
        assert await verifying(jwks, leeway_s=120.0).key_name(presented) == "team-a"


@pytest.mark.parametrize(
    ("value", "name"),
    [("alpha", "team-a"), (["beta", "unmapped"], "team-b"), (["alpha", "beta"], None), ("team-a", None), (None, None)],
)
async def test_a_claim_is_mapped_to_exactly_one_key(jwks: str, value: Any, name: str | None) -> None:
    tokens = verifying(jwks, claim="org", keys={"alpha": "team-a", "beta": "team-b"})
    if name is not None:
        assert await tokens.key_name(token(org=value)) == name
        return
    with pytest.raises(Unauthorized, match=r"names (no key|several keys) in the claim org"):
        await tokens.key_name(token(org=value))


async def test_a_key_that_is_too_short_verifies_nothing(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(key_set("short"))
    with pytest.warns(InsecureKeyLengthWarning):
        presented = token("short")
    with pytest.raises(Unauthorized, match="is signed with a key that is too short"):
        await verifying(str(path)).key_name(presented)


def test_of_a_key_set_only_public_keys_for_signatures_count() -> None:
    private: dict[str, Any] = RSAAlgorithm.to_jwk(rsa_key("one"), as_dict=True)
    useless: list[dict[str, Any]] = [
        private | {"kid": "private"},
        jwk("one", kid="encrypts", use="enc"),
        jwk("one", kid="other", alg="PS512"),
        jwk("one", kid="wraps", key_ops=["wrapKey"]),
        jwk("one", kid=7),
        jwk("one", kid="broken", n="!"),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret"},
        {"kty": "new", "kid": "unknown"},
    ]
    keys = parse_key_set(json.dumps({"keys": [*useless, jwk("one")]}).encode(), ("RS256", "ES256"))
    found = [keys.find(kid, "RS256") for kid in ("private", "encrypts", "other", "broken", "secret", "unknown")]
    assert found == [()] * 6
    assert keys.find("one", "RS256") == keys.find(None, "RS256") != ()  # the only one needs no name
    with pytest.raises(ConfigError, match="no public key for RS256"):
        parse_key_set(json.dumps({"keys": useless}).encode(), ("RS256",))


@pytest.mark.parametrize("kid", [None, "same"])
async def test_keys_that_no_id_tells_apart_are_tried(tmp_path: Path, kid: str | None) -> None:
    keys = [jwk(name, kid=kid) for name in ("one", "two")]
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": keys}))
    tokens = verifying(str(path))
    for signer in ("one", "two"):
        presented = token(signer, header={"kid": kid})
        assert await tokens.key_name(presented) == "team-a"
    with pytest.raises(Unauthorized, match="signature that is not its issuer's"):
        await tokens.key_name(token("three", header={"kid": kid}))
    with pytest.raises(Unauthorized, match="has expired"):
        await tokens.key_name(token("one", header={"kid": kid}, exp=now(-100)))
    path.write_text(json.dumps({"keys": keys * 3}))
    with pytest.raises(Unauthorized, match="does not publish"):  # nobody makes a gateway try any number
        await verifying(str(path)).key_name(token("one", header={"kid": kid}))


# --- whose keys are asked for


async def test_a_token_is_verified_once_until_it_expires(jwks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(float(now()))
    tokens = TokenVerifier([issuer(jwks)], clock=clock)
    verified, decode = [], jwt.decode

    def counted(token: str, *arguments: Any, **fields: Any) -> Any:
        verified.append(token)
        return decode(token, *arguments, **fields)

    monkeypatch.setattr(jwt, "decode", counted)
    first, second = token(exp=now(60)), token("ec", "ES256")
    for presented in (first, second, first, second):
        assert await tokens.key_name(presented) == "team-a"
    assert len(verified) == 2
    clock.now += 89.0  # with the leeway
    await tokens.key_name(first)
    assert len(verified) == 2
    clock.now += 2.0
    await tokens.key_name(first)
    assert len(verified) == 3
    monkeypatch.setattr(verifier, "MAX_REMEMBERED", 2)
    for number in range(4):
        await tokens.key_name(token(more=number))
    assert len(tokens._verified) == 2


async def test_an_unknown_key_is_asked_for_and_not_too_often() -> None:
    clock = Clock()
    async with published(key_set("one")) as server:
        tokens = verifying(server.url, clock)
        await tokens.key_name(token())
        for kid in ("two", "three"):
            with pytest.raises(Unauthorized, match="does not publish"):
                await tokens.key_name(token(kid))
        assert server.num_asked == 1
        server.body = key_set("two")
        clock.now += AGAIN_S
        asked = await asyncio.gather(*(tokens.key_name(token("two", more=number)) for number in range(8)))
        assert asked == ["team-a"] * 8
        assert server.num_asked == 2
        with pytest.raises(Unauthorized, match="does not publish"):
            await tokens.key_name(token())  # was verified, with a key that is not published any more


async def test_an_issuer_that_is_down_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    async with published(key_set("one")) as server:
        tokens = verifying(server.url, clock)
        server.status = 503
        with pytest.raises(Unavailable):
            await tokens.key_name(token())
        server.status = 200
        with pytest.raises(Unavailable):  # it was asked just now
            await tokens.key_name(token())
        clock.now += AGAIN_S
        assert await tokens.key_name(token()) == "team-a"
    for _ in range(3):
        clock.now += AGAIN_S
        with pytest.raises(Unauthorized):
            await tokens.key_name(token("two"))
        assert await tokens.key_name(token(more=clock.now)) == "team-a"
    problems = [record.message.rpartition(": ")[2] for record in caplog.records if record.levelname == "ERROR"]
    assert problems == ["it answers 503", "it cannot be reached (ClientConnectorError)"]


def _oversized(server: Published) -> None:
    server.body = key_set("two") + b" " * MAX_KEY_SET_BYTES


def _redirect(server: Published) -> None:
    server.body, server.status, server.headers = key_set("two"), 302, {"Location": "http://127.0.0.1:1/"}


def _many(server: Published) -> None:
    server.body = json.dumps({"keys": [jwk("two")] * 65}).encode()


def _deep(server: Published) -> None:
    server.body = b'{"keys": ' + b"[" * 100_000


def _garbage(server: Published) -> None:
    server.body = b"<html>SECRET</html>"


def _slow(server: Published) -> None:
    server.delay_s = 5.0


@pytest.mark.parametrize("spoil", [_oversized, _redirect, _many, _deep, _garbage, _slow])
async def test_a_bad_answer_changes_nothing(
    spoil: Callable[[Published], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    async with published(key_set("one")) as server:
        tokens = verifying(server.url, clock)
        await tokens.key_name(token())
        monkeypatch.setattr(issuer_keys, "_TIMEOUT_S", 0.2)  # of the bad answer, not of the good one before it
        spoil(server)
        clock.now += AGAIN_S
        with pytest.raises(Unauthorized, match="does not publish"):
            await tokens.key_name(token("two"))
        assert await tokens.key_name(token(more=1)) == "team-a"
    (problem,) = (record.message for record in caplog.records if record.levelname == "ERROR")
    assert "are not to be had" in problem
    assert "SECRET" not in problem


async def test_keys_are_fetched_at_the_start_and_again() -> None:
    async with published(key_set("one")) as server:
        tokens = verifying(server.url)
        await tokens.start()
        try:
            assert server.num_asked == 1
            assert await tokens.key_name(token()) == "team-a"
            assert server.num_asked == 1
        finally:
            tokens.stop()


# --- the configuration


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"jwks": "http://issuer.example/keys"}, r"gateway\.jwt\.jwks must begin with https://"),
        ({"jwks": "ftp://issuer.example/keys"}, r"gateway\.jwt\.jwks"),
        ({"jwks": "https://user:word@issuer.example/keys"}, r"gateway\.jwt\.jwks"),
        ({"jwks": "http://127.0.0.1.example/keys"}, r"gateway\.jwt\.jwks"),
        ({"jwks": "keys.json"}, r"gateway\.jwt\.jwks"),
        ({"algorithms": ["HS256"]}, r"gateway\.jwt\.algorithms must be some of RS256"),
        ({"algorithms": ["none"]}, r"gateway\.jwt\.algorithms"),
        ({"algorithms": []}, r"gateway\.jwt\.algorithms"),
        ({"audience": []}, r"gateway\.jwt\.audience"),
        ({"leeway_s": 3600}, r"gateway\.jwt\.leeway_s"),
        ({"clame": "sub"}, "clame"),
    ],
)
def test_a_bad_issuer_is_named(fields: dict[str, Any], words: str) -> None:
    one = {"issuer": ISSUER, "audience": [AUDIENCE], "jwks": "https://issuer.example/keys"}
    assert config_of({"gateway": {"keys_file": "k", "jwt": [one]}}).gateway.jwt[0].claim == "sub"
    with pytest.raises(ConfigError, match=words):
        config_of({"gateway": {"keys_file": "k", "jwt": [one | fields]}})


def test_issuers_without_the_plugin_are_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: []")
    keys.chmod(0o600)
    config = GatewayConfig(keys_file=str(keys), jwt=(issuer("https://issuer.example/keys"),))
    for name in [name for name in sys.modules if name.startswith("plugins.jwt")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jwt", None)
    monkeypatch.setattr(commands, "load_plugin", load_plugin.__wrapped__)
    monkeypatch.setattr(services, "load_plugin", load_plugin.__wrapped__)
    starts: tuple[Callable[[GatewayConfig], object], ...] = (check_keys, build_services)
    for start in starts:
        with pytest.raises(ConfigError, match=r"jwt needs jwt: pip install 'alignedserve\[jwt\]'"):
            start(config)


def test_issuers_need_a_file_of_keys_and_names_of_their_own(tmp_path: Path) -> None:
    one = issuer("https://issuer.example/keys")
    with pytest.raises(ConfigError, match=r"gateway\.keys_file must be set with gateway\.jwt"):
        GatewayConfig(jwt=(one,))
    with pytest.raises(ConfigError, match=r"gateway\.jwt must be .* each once"):
        GatewayConfig(keys_file="k", jwt=(one, one))
    path, keys = tmp_path / "jwks.json", tmp_path / "keys.yaml"
    keys.write_text("keys: []")
    keys.chmod(0o600)
    config = GatewayConfig(keys_file=str(keys), jwt=(issuer(str(path)),))
    for words, text in (("No such file", None), ("no JWK set", b"[]"), ("no public key", b'{"keys": []}')):
        if text is not None:
            path.write_bytes(text)
        with pytest.raises(ConfigError, match=rf"gateway\.jwt: {path}: .*{words}"):
            check_keys(config)
    path.write_bytes(key_set("one"))
    check_keys(config)
