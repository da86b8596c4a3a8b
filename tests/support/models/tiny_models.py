"""Small random checkpoints of every family, written by transformers, for tests: rows of tiny_models.json.

A row has what it adds to the row that it is `like`; `of` is the class of its config.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ROWS: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def _families(group: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the class of each family's config, and its arguments."""
    every = {name: row for rows in ROWS.values() for name, row in rows.items()}

    def whole(row: dict[str, Any]) -> dict[str, Any]:
        fields = {**(whole(every[row["like"]]) if "like" in row else {}), **row}
        return {name: value for name, value in fields.items() if name not in ("about", "like")}

    rows = {name: whole(row) for name, row in ROWS[group].items()}
    return {name: (row.pop("of"), row) for name, row in rows.items()}


TINY_MODELS = _families("first")
LATER_FAMILIES = _families("later")  # with parts of other families: what differs is tried, and nothing twice


def transformers_library() -> Any:
    """Return transformers, which takes a second to import and is not typed for strict checking."""
    return import_module("transformers")


def make_tiny_model(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Write a checkpoint into `folder` and return the same model (float32, evaluation mode).

    `family`: a key of TINY_MODELS or LATER_FAMILIES. `changes`: arguments of its config in place of those there.
    """
    library = transformers_library()
    class_name, arguments = (TINY_MODELS | LATER_FAMILIES)[family]
    config = getattr(library, class_name)(**arguments | changes)
    torch.manual_seed(seed)
    model: Any = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger and less regular than a fresh model: biases that do something, logits that differ.
            parameter.add_(torch.randn(parameter.shape) * (0.05 if "norm" in name or "bias" in name else 0.08))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(torch.randn(buffer.shape) * 0.2)
    model.train(False)
    library.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, safe_serialization=True)
    return model
