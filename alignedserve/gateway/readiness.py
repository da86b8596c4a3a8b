"""Readiness of a gateway: whether requests are to come to it."""

from alignedserve.api.models.model_registry import ModelRegistry
from alignedserve.gateway.intake import Intake


class Readiness:
    """Knows whether this gateway wants requests, and whether every model that it serves answers."""

    def __init__(self, models: ModelRegistry, intake: Intake) -> None:
        self._models = models
        self._intake = intake
        self.is_draining = False  # no more requests are to come here

    def missing(self) -> str | None:
        """Return the reason why it is not ready; None when it is."""
        return "draining" if self.is_draining or self._intake.is_closed else self._models.missing()
