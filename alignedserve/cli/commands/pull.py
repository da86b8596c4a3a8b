"""`alignedserve pull`: download a model from a hub, without serving it."""

from alignedserve.cli.console import INTERRUPTED, notes
from alignedserve.cli.downloads import fetch_model
from alignedserve.config.sections import ModelSectionConfig
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.hub.file_choice import names_hub_model, parse_hub_name
from alignedserve.runtime.model.named_models import SMOLLM2, full_name, smollm2_file


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
