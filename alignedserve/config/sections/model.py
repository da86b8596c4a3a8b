"""The section of the model to serve."""

from typing_extensions import override

from alignedserve.config.sections.base import Section

# Names of alignedserve.api.tools.formats and alignedserve.api.reasoning.formats, which stand on a higher floor.
TOOL_FORMATS = (
    "smollm2",
    "qwen3_coder",
    "glm45",
    "functionary",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "mistral_args",
    "mistral",
    "hermes",
    "llama3_json",
    "phi4_mini",
    "granite",
    "gpt_oss",
    "json",
)
REASONING_FORMATS = ("think", "magistral", "seed_oss", "command_a", "gpt_oss")


class ModelSectionConfig(Section, frozen=True):
    """Model to serve, and its form."""

    path: str = "pocket"  # a Hugging Face folder, ORG/NAME on a hub, or "pocket" for the model that ships
    served_model_name: str | None = None  # the name clients use; the folder's name when unset
    dtype: str = "auto"  # float32, bfloat16, float16; auto: bfloat16 where it is multiplied natively, else float32
    quantization: str | None = None  # int8: linear layers with weights of 8 bits, less exact
    max_context_len: int | None = None  # tokens; when unset the model's own limit, or less where memory is short
    random_weights: bool = False  # serve a config.json without weights, for benchmarks
    chat_template: str | None = None  # a file with a jinja2 template to use instead of the model's own
    tool_format: str | None = None  # how the model writes tool calls; when unset found from its chat template
    reasoning_format: str | None = None  # how it marks a thought; when unset found from its chat template

    @classmethod
    @override
    def _section_name(cls) -> str:
        return "model"

    def __post_init__(self) -> None:
        self._require(bool(self.path), "path", "must name a model folder")
        known = ("auto", "float32", "bfloat16", "float16")
        self._require(self.dtype in known, "dtype", f"must be one of {', '.join(known)}")
        self._require(self.quantization in (None, "int8"), "quantization", "must be int8 or unset")
        self._require(self.max_context_len is None or self.max_context_len > 1, "max_context_len", "must exceed 1")
        for field, names in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            is_known = getattr(self, field) in (None, *names)
            self._require(is_known, field, f"must be one of {', '.join(names)}, or unset")
