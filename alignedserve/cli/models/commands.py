"""`alignedserve models`: what is in the cache of downloads, and its removal."""

from dataclasses import asdict

from rich.table import Table

from alignedserve.cli.console import notes, print_json, printable, results
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.hub.file_choice import parse_hub_name
from alignedserve.runtime.model.hub.model_cache import list_models, remove_model

_COMMIT_LEN = 10  # of forty characters; as much as tells revisions apart


def show_list(json_output: bool) -> None:
    models = list_models()
    if json_output:
        print_json([{**asdict(model), "path": str(model.path)} for model in models])
        return
    if not models:
        notes().print("No model has been downloaded; `alignedserve pull ORG/NAME` does.")
        return
    table = Table("model", "revision", "commit", "weights", "MB")
    for model in models:
        cells = (model.repo_id, ", ".join(model.revisions), (model.commit or "")[:_COMMIT_LEN], model.weights)
        table.add_row(*(printable(cell) for cell in cells), f"{model.num_bytes / 1e6:.1f}")
    results().print(table)


def remove(model: str) -> None:
    """Remove a model or a revision and say what that frees. Raises ConfigError, ModelNotFound, StorageError."""
    name = parse_hub_name(model)
    if name.quantization is not None:
        raise ConfigError(f"{model}: models are removed whole; leave out :{name.quantization}")
    notes().print(f"Removed {name}: {remove_model(name) / 1e6:.1f} MB freed", soft_wrap=True)
