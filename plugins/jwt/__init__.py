"""Tokens (JWT) of an issuer in place of keys: what the gateway calls `TokensPlugin`. The extra `jwt`."""

from plugins.jwt.issuer_keys import check_file
from plugins.jwt.verifier import TokenVerifier

__all__ = ["TokenVerifier", "check_file"]
