"""The memory that a worker needs once answers are held to grammars."""

# Measured: 12 MB for 50 000 tokens, 28 MB for 150 000 in a process of its own.
_TOKEN_BYTES = 256
# Of 512 schemas of 2 KB, as many as are kept: 77 MB. Of 64 that answers have followed: 0.02 MB each for plain ones, 5
# with strings of up to 2 000 characters, at most 35.
_KEPT_GRAMMARS_BYTES = 80 << 20


def grammar_bytes(vocab_size: int) -> int:
    """Return the bytes of a vocabulary that grammars are matched against, and of compiled grammars that are kept."""
    return _TOKEN_BYTES * vocab_size + _KEPT_GRAMMARS_BYTES
