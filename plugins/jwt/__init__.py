"""Tokens (JWT) of an issuer in place of keys. The extra `jwt`."""
