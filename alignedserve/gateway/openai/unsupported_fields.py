"""Fields of OpenAI's API that are not supported, each with its neutral values.

Neutral values ask for nothing and are accepted; any other is refused by name. JSON null is always neutral.
"""

from collections.abc import Mapping
from typing import Any

NeutralValues = Mapping[str, tuple[Any, ...]]

CHAT: NeutralValues = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION: NeutralValues = {
    "best_of": (1,),
    "suffix": (),
}
STREAM_OPTIONS: NeutralValues = {"include_obfuscation": (False,)}
MESSAGE: NeutralValues = {
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
}
PART: NeutralValues = {"prompt_cache_breakpoint": ()}
SERVICE_TIERS = ("scale",)
ROLES = ("function",)
TOOL_TYPES = ("custom",)
PART_TYPES = ("image_url", "input_audio", "file", "refusal")
