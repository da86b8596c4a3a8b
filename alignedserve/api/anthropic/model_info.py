"""The served model as Anthropic's clients see it."""

from typing import Any

from alignedserve.api.anthropic.timestamps import timestamp
from alignedserve.api.models.model_card import ModelCard


def model_info(model: ModelCard) -> dict[str, Any]:
    """Return the model's object. It is one pool of tokens for prompt and answer: either may fill it."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": timestamp(model.created),
        "lifecycle": "active",
        "max_input_tokens": model.max_context_len,
        "max_tokens": model.max_context_len,
    }


def model_list(models: list[ModelCard]) -> dict[str, Any]:
    """Return the page of all models."""
    shown = [model_info(model) for model in models]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "has_more": False, "first_id": first_id, "last_id": last_id}
