"""Opens files of this user alone."""

import os
from pathlib import Path


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, of mode 0600 where it is made, and no link: an opener for `open`. Raises OSError."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
