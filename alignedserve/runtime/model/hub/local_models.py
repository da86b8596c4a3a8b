"""Models that a section names on a hub, put in its place on this machine. The hub's client is loaded for those."""

from typing import TYPE_CHECKING

import msgspec

from alignedserve.config.sections import ModelSectionConfig
from alignedserve.runtime.model.hub.file_choice import names_hub_model, parse_hub_name
from alignedserve.runtime.model.named_models import full_name

if TYPE_CHECKING:
    from alignedserve.runtime.model.hub.repository import Hub, Report


def with_local_model(
    section: ModelSectionConfig, report: "Report | None" = None, hub: "Hub | None" = None
) -> ModelSectionConfig:
    """Download a section's model from a hub, if it names one there, and put its path into the section. Clients call
    it by its name on the hub, or its short name, unless the section has another. Raises like Hub.fetch."""
    full = full_name(section.path)
    if full != section.path:
        section = msgspec.structs.replace(
            section, path=full, served_model_name=section.served_model_name or section.path
        )
    if not names_hub_model(section.path):
        return section
    from alignedserve.runtime.model.hub.repository import Hub

    name = parse_hub_name(section.path)
    path = (hub or Hub()).fetch(name, report, has_weights=not section.random_weights)
    return msgspec.structs.replace(section, path=str(path), served_model_name=section.served_model_name or name.repo_id)
