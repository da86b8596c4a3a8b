"""Pictures that a person adds to the next message of `alignedserve chat`."""

import base64
import mimetypes
from pathlib import Path

from alignedserve.core.errors import ConfigError

_MAX_BYTES = 32 << 20


def picture_part(path: str) -> dict[str, object]:
    """Return the part of a message with the picture in this file. Raises ConfigError."""
    file = Path(path).expanduser()
    kind, _ = mimetypes.guess_type(file.name)
    if kind is None or not kind.startswith("image/"):
        raise ConfigError(f"{path}: its name is not one of a picture, such as otter.jpg")
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES >> 20} MiB")
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(content).decode()}"}}
