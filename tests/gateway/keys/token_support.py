"""Issuers of tokens for tests: real keys, tokens that say anything, and a server of their public keys."""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from jwt.utils import base64url_encode

from alignedserve.config.sections.gateway import JwtIssuer

ISSUER, AUDIENCE = "https://issuer.example", "alignedserve"


@cache
def rsa_key(name: str) -> rsa.RSAPrivateKey:
    """The key of this name; `short` is too short."""
    return rsa.generate_private_key(65537, 1024 if name == "short" else 2048)


@cache
def ec_key(name: str) -> ec.EllipticCurvePrivateKey:
    """The key of this name."""
    return ec.generate_private_key(ec.SECP256R1())


def jwk(name: str, **fields: Any) -> dict[str, Any]:
    """The public key of this name as it is published; of those that begin with `ec`, on a curve."""
    public: dict[str, Any]
    public = (
        ECAlgorithm.to_jwk(ec_key(name).public_key(), as_dict=True)
        if name.startswith("ec")
        else RSAAlgorithm.to_jwk(rsa_key(name).public_key(), as_dict=True)
    )
    return public | {"kid": name, "use": "sig"} | fields


def key_set(*kids: str) -> bytes:
    """The document that publishes these keys."""
    return json.dumps({"keys": [jwk(kid) for kid in kids]}).encode()


def claims(**fields: Any) -> dict[str, Any]:
    """Claims that hold, with these in place of theirs; None: left out."""
    now = int(time.time())
    usual = {"iss": ISSUER, "aud": AUDIENCE, "sub": "team-a", "iat": now, "exp": now + 600}
    return {name: value for name, value in (usual | fields).items() if value is not None}


def token(kid: str = "one", algorithm: str = "RS256", header: dict[str, Any] | None = None, **fields: Any) -> str:
    """A token signed with the key of this name. A field of its header that is None is left out."""
    key: PrivateKeyTypes = ec_key(kid) if kid.startswith("ec") else rsa_key(kid)
    fields_of_header = {name: value for name, value in ({"kid": kid} | (header or {})).items() if value is not None}
    return jwt.encode(claims(**fields), key, algorithm, fields_of_header)  # type: ignore[arg-type]


def confused_token(algorithm: str) -> str:
    """A token that anybody can make: signed with the public key as if that were a secret, or not at all."""
    header = {"alg": algorithm, "typ": "JWT", "kid": "one"}
    parts = [base64url_encode(json.dumps(part).encode()) for part in (header, claims())]
    public = rsa_key("one").public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = b"" if algorithm == "none" else hmac.digest(public, b".".join(parts), hashlib.sha256)
    return b".".join([*parts, base64url_encode(signature)]).decode()


def issuer(jwks: str, **fields: Any) -> JwtIssuer:
    """An issuer whose keys are there."""
    return JwtIssuer(issuer=ISSUER, audience=(AUDIENCE,), jwks=jwks, **fields)


class Published:
    """What a server of keys answers, and how often it was asked."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.status = 200
        self.headers: dict[str, str] = {}
        self.num_asked = 0
        self.delay_s = 0.0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        await asyncio.sleep(self.delay_s)
        return web.Response(body=self.body, status=self.status, headers=self.headers)


@asynccontextmanager
async def published(body: bytes) -> AsyncIterator[Published]:
    """A server of keys on loopback."""
    told = Published(body)
    app = web.Application()
    app.router.add_get("/{path:.*}", told.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    told.url = f"http://127.0.0.1:{port}/keys"
    try:
        yield told
    finally:
        await runner.cleanup()
