"""The configuration of the encoder by which a model sees: sizes, and the form of its pictures; without torch."""

import enum
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.runtime.model.decoder.decoder_parts import Activation, NormKind
from alignedserve.runtime.model.weight_names import read_names
from plugins.vision.forms import CHANNELS, CanvasForm, CellsForm, EncoderWork, PictureForm, TiledForm

CACHE_BYTES = 128 << 20  # of a worker, for embeddings of pictures


class PairOrder(enum.Enum):
    """Where files have the two elements of a pair that a rotation turns, and which pairs turn by rows."""

    ROWS_FIRST = "rows first"  # half a head apart; the first half of pairs turns by rows
    NEIGHBOURS = "neighbours"  # side by side; the second half of pairs turns by rows
    QUARTERS = "quarters"  # a quarter of a head apart; those of the second half of a head turn by rows


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
    positions: str = ""  # a tensor of this name; empty, as of the next: there is none
    class_token: str = ""  # likewise, of one more row behind the patches, of which nothing is made
    first_norm: str = ""
    last_norm: str = ""
    connector_norm: str = ""
    merger: str = ""  # the product of joined patches, before the connector's
    inside: tuple[str, ...] = ("",)  # what may stand before all names but those of the connector
    deep_norm: str = ""  # with {level}: of the connectors of inner layers, as the next
    deep: tuple[str, ...] = ()  # with {level}
    transposes_connector: bool = False  # its one product is a tensor of this name, [inputs, outputs]
    has_flat_patches: bool = False  # their weight is a matrix
    pairs: PairOrder = PairOrder.ROWS_FIRST  # of the elements of a head that rotations turn
    has_pixels_last: bool = False  # the weight of patches has channels behind pixels
    query_norm: str = ""  # of heads, as the next
    key_norm: str = ""
    attention_post_norm: str = ""  # behind the parts of a layer, as the next
    mlp_post_norm: str = ""
    standard: tuple[str, str] | None = None  # tensors of these names: what pooled patches lose, and are multiplied with

    def within(self, inside: str) -> "VisionNames":
        return replace(
            self,
            patches=inside + self.patches,
            layer=inside + self.layer,
            positions=inside + self.positions if self.positions else "",
            standard=None if self.standard is None else (inside + self.standard[0], inside + self.standard[1]),
            first_norm=inside + self.first_norm if self.first_norm else "",
            last_norm=inside + self.last_norm if self.last_norm else "",
        )


class PositionKind(enum.Enum):
    """Which rows of the table of positions a patch has."""

    BUCKETS = "buckets"  # a row by the place, as a fraction of the part
    EACH = "each"  # a row each: parts are as large as the table
    BETWEEN = "between"  # four rows around the place, weighed by distance
    AXES = "axes"  # the sum of a row by column and a row by row, of two tables


class VisionConfig(msgspec.Struct, frozen=True, tag=True):
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
    connector_activation: Activation | None = None  # between its products; None: it has one
    has_connector_bias: bool = False
    connector_eps: float = 0.0  # of its norm
    connector_norm: NormKind = NormKind.RMS
    norms_joined: bool = False  # its norm is of joined patches; False: of each
    is_pooled: bool = False  # joined patches become their mean
    connector_width: int | None = None  # between its products; None: `out_width`
    num_frames: int = 1  # of a film that a patch is of; a picture is all of them
    shares_frequencies: bool = False  # rows and columns turn pairs by the same ones; False: by every other one
    first_place: int = 0  # of rows and columns, where rotations begin
    window_edge: int | None = None  # in patches, of the squares that patches attend within; None: the whole part
    full_layers: tuple[int, ...] = ()  # that attend to the whole part all the same
    positions: PositionKind = PositionKind.BUCKETS
    deep_layers: tuple[int, ...] = ()  # behind which a connector makes what is added behind the text's first layers
    has_head_norms: bool = False  # queries, keys and values are normalised, the latter without weights
    score_scale: float | None = None  # None: 1 / sqrt(head_dim)
    pooled_scale: float = 1.0  # of pooled patches
    is_clipped: bool = False  # what products read and give is cut to ranges of the files
    has_unit_norm: bool = False  # the norm of the connector has no weights

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def needs_caches(self) -> bool:
        """Return whether keys and values of pictures cannot be recomputed token by token, as from layer inputs."""
        return isinstance(self.form, CellsForm) or self.form.is_whole

    @property
    def patch_width(self) -> int:
        """Return the pixels of a patch, of all channels."""
        return CHANNELS * self.patch_size**2

    @property
    def num_positions(self) -> int:
        """Return the rows of the table of positions; 0: there is none."""
        if self.num_sides is None:
            return 0
        if self.positions is PositionKind.AXES:
            return 2 * self.num_sides
        return self.num_sides**2 + bool(self.names.class_token)

    @property
    def joined_width(self) -> int:
        return self.hidden_size * (1 if self.is_pooled else self.join**2)

    @property
    def embedding_width(self) -> int:
        """Return the elements of a prompt token's embedding: its input, and what inner layers add."""
        return self.out_width * (1 + len(self.deep_layers))

    @property
    def connected_width(self) -> int:
        return self.hidden_size if self.names.merger else self.joined_width

    def with_work(self, text_parameters: int) -> "VisionConfig":
        """Return the config whose form knows what pictures cost; `text_parameters`: that a prompt token is multiplied
        with."""
        num_full = self.num_layers if self.window_edge is None else len(self.full_layers)
        window = 0 if self.window_edge is None else self.window_edge**2 * (self.num_layers - num_full)
        alone = self.num_layers * self._layer_parameters + 2 * self.hidden_size * window
        part = self.form.tile_tokens * self.join**2 if isinstance(self.form, TiledForm | CanvasForm) else None
        work = EncoderWork(
            token_patches=self.join**2,
            patch_tokens=alone / text_parameters,
            pair_tokens=2 * self.hidden_size * num_full / text_parameters,
            part_patches=part,
        )
        return msgspec.structs.replace(self, form=msgspec.structs.replace(self.form, work=work))

    @property
    def num_parameters(self) -> int:
        width = self.hidden_size
        norm = width * (2 if self.norm is NormKind.LAYER else 1)
        post_norms = bool(self.names.attention_post_norm) + bool(self.names.mlp_post_norm)
        layer = self._layer_parameters + (2 + post_norms) * norm + 2 * self.head_dim * self.has_head_norms
        num_rows = self.num_positions + bool(self.names.class_token) + int(self.has_patch_bias)
        embedded = (self.num_frames * self.patch_width + num_rows) * width
        norms = norm * (bool(self.names.first_norm) + bool(self.names.last_norm))
        return embedded + self.num_layers * layer + norms + self._connector_parameters

    @property
    def _layer_parameters(self) -> int:
        width, inner, bias = self.hidden_size, self.intermediate_size, int(self.has_bias)
        ups = 2 if self.is_gated else 1
        return 4 * width * (width + bias) + ups * inner * (width + bias) + width * (inner + bias)

    @property
    def _connector_parameters(self) -> int:
        out, bias = self.out_width, int(self.has_connector_bias)
        inner = self.connector_width or out
        products = inner * (self.connected_width + bias)
        if self.connector_activation is not None:
            products += (len(self.names.connector) - 2) * inner * (inner + bias) + out * (inner + bias)
        merger = self.joined_width * self.hidden_size if self.names.merger else 0
        weights = 2 if self.connector_norm is NormKind.LAYER else 1
        own_norm = weights * (self.joined_width if self.norms_joined else self.hidden_size)
        deep = len(self.deep_layers) * (products + weights * self.joined_width)
        return products + merger + deep + (own_norm if self.names.connector_norm else 0)

    def worker_bytes(self, dtype: str) -> int:
        return self.num_parameters * DTYPE_BYTES[dtype] + CACHE_BYTES


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


NAMES = read_names(Path(__file__).with_name("names.json"), VisionNames)
