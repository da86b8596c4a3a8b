"""Fields of OpenAI's API, and of other servers', that are not supported, each with its neutral values.

Neutral values ask for nothing and are accepted; any other is refused by name. JSON null is always neutral.
"""

from collections.abc import Mapping
from typing import Any

NeutralValues = Mapping[str, tuple[Any, ...]]

# Fields of other open servers that change an answer, on both endpoints: never ignored as those that nobody knows are.
OTHER_SERVERS: NeutralValues = {
    # Adapters.
    "adapter": (),
    "adapter_id": (),
    "lora": ([],),
    "lora_path": (),
    "lora_request": (),
    # Other inputs than text.
    "images": ([],),
    "image_data": (),
    "input_embeds": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    # Constraints.
    "ebnf": (),
    "format": (),
    "grammar": ("",),
    "json_schema": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "regex": (),
    "stop_regex": ([],),
    "structural_tag": (),
    # Other ways to choose tokens.
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "xtc_probability": (0,),
    # Other prompts, and answers that end or show otherwise.
    "chat_template": (),
    "custom_params": ({},),
    "documents": ([],),
    "include_reasoning": (True,),
    "logprob_token_ids": ([],),
    "max_new_tokens": (),
    "media_io_kwargs": ({},),
    "n_predict": (-1,),
    "no_stop_trim": (False,),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
}
# Of OpenAI's API, on both endpoints, whichever of them has it there.
_OPENAI: NeutralValues = {
    "audio": (),
    "best_of": (1,),
    "modalities": (["text"],),
    "moderation": (),
    "suffix": ("",),
    "web_search_options": (),
}
CHAT: NeutralValues = {**OTHER_SERVERS, **_OPENAI, "add_special_tokens": (False,), "echo": (False,)}
COMPLETION: NeutralValues = {**OTHER_SERVERS, **_OPENAI}
MESSAGE: NeutralValues = {
    "audio": (),
    "refusal": (),
}
PART: NeutralValues = {}
SERVICE_TIERS = ("scale",)
TOOL_TYPES = ("custom",)
PART_TYPES = ("input_audio", "file", "refusal")
