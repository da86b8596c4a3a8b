"""The configuration of the encoder by which a model sees: sizes, and the form of its pictures; without torch."""

from dataclasses import dataclass

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.pictures.form import CHANNELS, CellsForm, PictureForm
from alignedserve.runtime.model.model_config import Activation, NormKind

CACHE_BYTES = 128 << 20  # of a worker, for embeddings of pictures


@dataclass(frozen=True, slots=True)
class VisionNames:
    """Modules of one family; those of a layer follow `layer`. Files have all of them below one of the prefixes."""

    prefixes: tuple[str, ...]  # the first one under which the patches are found
    patches: str
    layer: str  # with {layer}
    attention_norm: str
    qkv: tuple[str, ...]  # three modules, or one of all rows
    output: str
    mlp_norm: str
    up: tuple[str, ...]  # gate and up, or up alone
    down: str
    connector: tuple[str, ...]  # products one after another
    positions: str = ""
    first_norm: str = ""  # empty, as of the next: there is none
    last_norm: str = ""
    connector_norm: str = ""
    merger: str = ""  # the product of joined patches, before the connector's


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A tower whose patches attend to all others of their part of a picture, and what makes prompt tokens of them."""

    form: PictureForm
    names: VisionNames
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # the edge of a patch, in pixels
    activation: Activation
    norm: NormKind  # LAYER or RMS
    norm_eps: float
    has_patch_bias: bool
    has_bias: bool  # of all products of layers
    is_gated: bool
    num_sides: int | None  # patches along an edge of the table of positions; None: there is none
    rope_theta: float | None  # of rows and columns; None: nothing is rotated
    join: int  # the edge of the squares of patches that become one token of the prompt
    joins_channels: bool  # of joined patches the same elements lie side by side; False: each patch's own
    out_width: int  # of a prompt token's input
    connector_activation: Activation | None = None  # between its two products; None: it has one
    has_connector_bias: bool = False
    connector_eps: float = 0.0  # of its norm
    connector_width: int | None = None  # between its two products; None: `out_width`
    num_frames: int = 1  # of a film that a patch is of; a picture is all of them
    shares_frequencies: bool = False  # rows and columns turn pairs by the same ones; False: by every other one
    window_edge: int | None = None  # in patches, of the squares that patches attend within; None: the whole part
    full_layers: tuple[int, ...] = ()  # that attend to the whole part all the same

    @property
    def head_dim(self) -> int:
        """Return the elements of one head."""
        return self.hidden_size // self.num_heads

    @property
    def counts_places(self) -> bool:
        """Return whether the text part rotates by rows and columns of pictures."""
        return isinstance(self.form, CellsForm)

    @property
    def patch_width(self) -> int:
        """Return the pixels of a patch, of all channels."""
        return CHANNELS * self.patch_size**2

    @property
    def joined_width(self) -> int:
        """Return the elements of the patches that become one token."""
        return self.hidden_size * self.join**2

    @property
    def connected_width(self) -> int:
        """Return the elements that the connector's first product reads."""
        return self.hidden_size if self.names.merger else self.joined_width

    @property
    def num_parameters(self) -> int:
        """Return the number of weights."""
        width, inner, bias = self.hidden_size, self.intermediate_size, int(self.has_bias)
        norm = width * (2 if self.norm is NormKind.LAYER else 1)
        ups = 2 if self.is_gated else 1
        layer = 4 * width * (width + bias) + ups * inner * (width + bias) + width * (inner + bias) + 2 * norm
        embedded = (self.num_frames * self.patch_width + int(self.has_patch_bias) + (self.num_sides or 0) ** 2) * width
        norms = norm * (bool(self.names.first_norm) + bool(self.names.last_norm))
        return embedded + self.num_layers * layer + norms + self._connector_parameters

    @property
    def _connector_parameters(self) -> int:
        out, bias = self.out_width, int(self.has_connector_bias)
        inner = self.connector_width or out
        products = inner * (self.connected_width + bias)
        products += out * (inner + bias) if self.connector_activation is not None else 0
        merger = self.joined_width * self.hidden_size if self.names.merger else 0
        return products + merger + (self.hidden_size if self.names.connector_norm else 0)

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights in `dtype`."""
        return self.num_parameters * DTYPE_BYTES[dtype]
