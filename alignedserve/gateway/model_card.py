"""What the gateway knows of the model it serves."""

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model under the name that clients use."""

    name: str
    folder: Path  # holds tokenizer.json
    max_context_len: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, for /v1/models
