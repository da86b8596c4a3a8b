"""How a model sees, as far as the core knows. The plugin `vision` reads both records from the files of a model."""

from typing import Any, Protocol, runtime_checkable

from alignedserve.core.plugins import load_plugin


@runtime_checkable
class PictureForm(Protocol):
    """How pictures stand in the prompts of a model."""

    @property
    def mark(self) -> str:
        """What the chat template writes for a picture."""


@runtime_checkable
class PictureEncoder(Protocol):
    """The configuration of the encoder by which a model sees; without torch."""

    @property
    def form(self) -> PictureForm:
        """How its pictures stand in prompts."""

    @property
    def needs_caches(self) -> bool:
        """Whether keys and values of pictures cannot be recomputed from the inputs of layers."""

    def worker_bytes(self, dtype: str) -> int:
        """Return the bytes of a worker for seeing: weights, and embeddings of pictures."""


def decode_seeing(kind: type, value: Any) -> Any:
    """Return a PictureForm or a PictureEncoder from its plain values: a hook of msgspec. Raises ConfigError."""
    return load_plugin("vision").decode_record(kind, value)
