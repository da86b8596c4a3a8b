"""The section of the model to serve."""

import msgspec
from typing_extensions import override

from alignedserve.config.sections.base import MIB, Section
from alignedserve.core.keep_alive import parse_keep_alive

_MAX_NAME_LEN = 200
_MAX_ALIASES = 16
_NAME = f"of 1 to {_MAX_NAME_LEN} printable characters, with neither an empty part nor . or .. between slashes"
# Names of alignedserve.api.tools.formats and alignedserve.api.reasoning, which stand on a higher floor.
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
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a model may have defaults of
REASONING_FORMATS = ("think", "magistral", "seed_oss", "command_a", "gpt_oss")


def _is_name(name: str) -> bool:
    """Return whether clients can write the name into a path: `ORG/NAME` is one, `../NAME` is not."""
    is_path = not {"", ".", ".."}.isdisjoint(name.split("/"))
    return len(name) <= _MAX_NAME_LEN and name.isprintable() and not is_path


class LoraConfig(Section, frozen=True):
    """Adapters that requests may name instead of the model: PEFT folders, the same paths on every host."""

    adapters: dict[str, str] = msgspec.field(default_factory=dict)  # folders by the names that clients use
    allowed_folder: str | None = None  # /v1/load_lora_adapter loads from below it; None: it is refused
    max_adapters: int = 16  # in the memory of each worker; those used least recently leave first
    memory_bytes: int = 512 * MIB  # of each worker, for all of them
    max_rank: int = 64

    def __post_init__(self) -> None:
        self._require_positive("max_adapters", "memory_bytes", "max_rank")
        self._require(self.max_rank <= 1024, "max_rank", "must be at most 1024")
        for name, path in self.adapters.items():
            self._require(_is_name(name) and bool(path), "adapters", f"must map names {_NAME} to folders")

    @property
    def is_enabled(self) -> bool:
        return bool(self.adapters) or self.allowed_folder is not None

    @property
    def worker_bytes(self) -> int:
        return self.memory_bytes if self.is_enabled else 0

    @property
    def max_worker_adapters(self) -> int:
        """Return how many adapters a worker may have in memory; 0: requests may name none."""
        return self.max_adapters if self.is_enabled else 0


class PoolConfig(Section, frozen=True):
    """KV pool in CPU memory, one per node, where prompts and decodes have workers of their own."""

    memory_bytes: int = 256 * MIB
    lease_s: float = 30.0  # a lease not used within this time is taken back

    def __post_init__(self) -> None:
        self._require_positive("memory_bytes", "lease_s")


class PrefixCacheConfig(Section, frozen=True):
    """Blocks of contexts that later requests with the same beginning reuse instead of computing them again."""

    enabled: bool = True
    # Memory of a node, beside its workers', for shared blocks that outlive a worker; 0: none. When unset as much as the
    # workers have, from free memory, where a node has several.
    host_bytes: int = 0
    shared_between_keys: bool = False  # API keys share each other's blocks; False: each key its own only
    # Of a worker's cache, the most that recurrent states take which are kept for later requests; 0: none is.
    state_share: float = 0.5

    def __post_init__(self) -> None:
        self._require(self.host_bytes >= 0, "host_bytes", "must be at least 0")
        self._require(0.0 <= self.state_share <= 1.0, "state_share", "must be between 0 and 1")

    @property
    def pool_bytes(self) -> int:
        """Return the memory of a node's pool for prefix blocks; 0: it keeps none."""
        return int(self.host_bytes) if self.enabled else 0


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
    # How answers are sampled where a request does not say: auto: as the model's makers say; none: as OpenAI's API;
    # or values by name (temperature, top_p, top_k, min_p, repetition_penalty), which win over the makers'.
    sampling: str | dict[str, float] = "auto"

    # Loaded by the first request that names it, not at the start (of the first model: at the start as well), and gone
    # from memory this long after the last one: seconds, or 90s, 5m, 1h; below 0: once others need the room. When unset
    # it is there from start to end.
    keep_alive: str | int | float | None = None
    aliases: tuple[str, ...] = ()  # further names by which clients may call it

    @classmethod
    @override
    def _section_name(cls) -> str:
        return "model"

    @property
    def keep_alive_s(self) -> float | None:
        """Return `keep_alive` in seconds, `inf`: for ever; None: the model is not on demand."""
        return None if self.keep_alive is None else parse_keep_alive(self.keep_alive)

    def __post_init__(self) -> None:
        self._require(bool(self.path), "path", "must name a model folder")
        known = ("auto", "float32", "bfloat16", "float16")
        self._require(self.dtype in known, "dtype", f"must be one of {', '.join(known)}")
        self._require(self.quantization in (None, "int8"), "quantization", "must be int8 or unset")
        self._require(self.max_context_len is None or self.max_context_len > 1, "max_context_len", "must exceed 1")
        try:
            _ = self.keep_alive_s
        except ValueError as error:
            self._require(False, "keep_alive", str(error))
        self._require(
            self.served_model_name is None or _is_name(self.served_model_name), "served_model_name", f"must be {_NAME}"
        )
        self._require(
            all(map(_is_name, self.aliases)) and len(self.aliases) <= _MAX_ALIASES,
            "aliases",
            f"must be at most {_MAX_ALIASES} names {_NAME}",
        )
        if isinstance(self.sampling, str):
            self._require(self.sampling in ("auto", "none"), "sampling", "must be auto, none or values by name")
        else:
            is_known = set(self.sampling) <= set(SAMPLING_FIELDS)
            self._require(is_known, "sampling", f"may have {', '.join(SAMPLING_FIELDS)}")
        for field, names in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            is_known = getattr(self, field) in (None, *names)
            self._require(is_known, field, f"must be one of {', '.join(names)}, or unset")
