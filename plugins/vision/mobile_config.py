"""The configuration of MobileNet-V5, by which Gemma 3n sees: blocks of convolutions and attention; without torch."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.hf_fields import MAX_VOCABULARY, MAX_WIDTH
from plugins.vision.forms import CHANNELS, EncoderWork, FixedForm, Scaling
from plugins.vision.tower_fields import HALVES, MAX_EDGE, check_square, read_scaling, section_of
from plugins.vision.vision_config import CACHE_BYTES, VisionConfig

STEM_KERNEL = 3
FUSED_EXPANSION = 2  # of the block that makes one of the last two stages

Shapes = dict[str, tuple[int, ...]]  # of tensors by their names in a block


class EdgeBlock(msgspec.Struct, frozen=True, tag=True):
    """A convolution that widens, and a product that narrows again."""

    width: int
    stride: int = 1
    kernel: int = 3
    expansion: int = 4

    def shapes(self, in_width: int) -> Shapes:
        """Return the tensors of a block that reads so many channels."""
        inner = in_width * self.expansion
        return {
            "conv_exp.weight": (inner, in_width, self.kernel, self.kernel),
            "bn1.weight": (inner,),
            "conv_pwl.weight": (self.width, inner, 1, 1),
            "bn2.weight": (self.width,),
        }

    def products(self, in_width: int, edge: int) -> int:
        """Return the products of numbers of a square of so many places along an edge."""
        inner, places = in_width * self.expansion, (-(-edge // self.stride)) ** 2
        return places * inner * (in_width * self.kernel**2 + self.width)


class InvertedBlock(msgspec.Struct, frozen=True, tag=True):
    """A product that widens and one that narrows again, with convolutions of each channel alone before and between."""

    width: int
    stride: int = 1
    first: int = 0  # the edge of the convolution before both; 0: there is none, as of the next
    middle: int = 0
    expansion: int = 4
    is_scaled: bool = True  # each channel of what is added has a factor

    def shapes(self, in_width: int) -> Shapes:
        """Return the tensors of a block that reads so many channels."""
        inner, shapes = in_width * self.expansion, Shapes()
        if self.first:
            shapes |= _convolved("dw_start", in_width, self.first)
        shapes |= {"pw_exp.conv.weight": (inner, in_width, 1, 1), "pw_exp.bn.weight": (inner,)}
        if self.middle:
            shapes |= _convolved("dw_mid", inner, self.middle)
        shapes |= {"pw_proj.conv.weight": (self.width, inner, 1, 1), "pw_proj.bn.weight": (self.width,)}
        return shapes | ({"layer_scale.gamma": (self.width,)} if self.is_scaled else {})

    def products(self, in_width: int, edge: int) -> int:
        """Return the products of numbers of a square of so many places along an edge."""
        inner, out = in_width * self.expansion, (-(-edge // self.stride)) ** 2
        widened = edge**2 if self.middle else out
        before = widened * in_width * (self.first**2 + inner)
        return before + out * inner * (self.middle**2 + self.width)


class QueryBlock(msgspec.Struct, frozen=True, tag=True):
    """Attention with one key head, whose keys and values may be of every other place alone."""

    width: int
    num_heads: int
    head_dim: int
    key_stride: int = 1
    kernel: int = 3  # of the convolution that leaves places out
    stride: int = 1

    def shapes(self, in_width: int) -> Shapes:
        """Return the tensors of a block that reads so many channels."""
        inner, shapes = self.num_heads * self.head_dim, Shapes({"norm.weight": (in_width,)})
        shapes["attn.query.proj.weight"] = (inner, in_width, 1, 1)
        for part in ("attn.key", "attn.value"):
            if self.key_stride > 1:
                shapes[f"{part}.down_conv.weight"] = (in_width, 1, self.kernel, self.kernel)
                shapes[f"{part}.norm.weight"] = (in_width,)
            shapes[f"{part}.proj.weight"] = (self.head_dim, in_width, 1, 1)
        return shapes | {"attn.output.proj.weight": (self.width, inner, 1, 1), "layer_scale.gamma": (self.width,)}

    def products(self, in_width: int, edge: int) -> int:
        """Return the products of numbers of a square of so many places along an edge."""
        inner, keys = self.num_heads * self.head_dim, (-(-edge // self.key_stride)) ** 2
        return edge**2 * inner * (in_width + self.width + 2 * keys) + 2 * keys * in_width * self.head_dim


Block = EdgeBlock | InvertedBlock | QueryBlock


class PlacedBlock(NamedTuple):
    """A block of a tower."""

    prefix: str  # of its tensors' names
    block: Block
    in_width: int
    edge: int  # of what it reads, in places


class MobileConfig(msgspec.Struct, frozen=True, tag=True):
    """A tower of stages of blocks, what makes one map of the last two stages, and prompt tokens of that."""

    form: FixedForm  # whose tokens are those of the map, and an end mark
    stages: tuple[tuple[Block, ...], ...]
    stem_width: int
    hidden_size: int  # of the map
    out_width: int  # of a prompt token's input
    num_marks: int  # rows of the table of marks
    end_mark: int  # the row of the end mark
    eps: float  # of the norms before and behind the last product
    block_eps: float = 1e-6

    @property
    def map_edge(self) -> int:
        return math.isqrt(self.form.tokens - 1)

    @property
    def needs_caches(self) -> bool:
        return False

    def blocks(self, stage: int) -> Iterator[PlacedBlock]:
        """Yield the blocks of a stage."""
        width, edge = self.stem_width, -(-self.form.edge // 2)
        for number, blocks in enumerate(self.stages[: stage + 1]):
            for index, block in enumerate(blocks):
                if number == stage:
                    yield PlacedBlock(f"blocks.{number}.{index}.", block, width, edge)
                width, edge = block.width, -(-edge // block.stride)

    @property
    def fused(self) -> PlacedBlock:
        in_width = self.stages[-2][-1].width + self.stages[-1][-1].width
        block = InvertedBlock(self.hidden_size, expansion=FUSED_EXPANSION, is_scaled=False)
        last = [block for placed in self.stages[: len(self.stages) - 1] for block in placed]
        edge = -(-self.form.edge // (2 * math.prod(block.stride for block in last)))
        return PlacedBlock("msfa.ffn.", block, in_width, edge)

    def tower_shapes(self) -> Shapes:
        shapes: Shapes = {
            "conv_stem.conv.weight": (self.stem_width, CHANNELS, STEM_KERNEL, STEM_KERNEL),
            "conv_stem.conv.bias": (self.stem_width,),
            "conv_stem.bn.weight": (self.stem_width,),
        }
        for placed in self._placed():
            shapes |= {placed.prefix + name: shape for name, shape in placed.block.shapes(placed.in_width).items()}
        return shapes | {"msfa.norm.weight": (self.hidden_size,)}

    def connector_shapes(self) -> Shapes:
        """Return the tensors of what makes prompt tokens of the map."""
        return {
            "embedding.weight": (self.num_marks, self.hidden_size),
            "hard_embedding_norm.weight": (self.hidden_size,),
            "soft_embedding_norm.weight": (self.hidden_size,),
            "embedding_projection.weight": (self.out_width, self.hidden_size),
        }

    def with_work(self, text_parameters: int) -> "MobileConfig":
        """See VisionConfig: all pictures cost the same."""
        stem = (self.form.edge // 2) ** 2 * self.stem_width * CHANNELS * STEM_KERNEL**2
        products = stem + sum(placed.block.products(placed.in_width, placed.edge) for placed in self._placed())
        products += self.form.tokens * self.hidden_size * self.out_width
        work = EncoderWork(1, products / text_parameters / self.form.tokens, 0.0, 1)
        return msgspec.structs.replace(self, form=msgspec.structs.replace(self.form, work=work))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in (self.tower_shapes() | self.connector_shapes()).values())

    def worker_bytes(self, dtype: str) -> int:
        return self.num_parameters * DTYPE_BYTES[dtype] + CACHE_BYTES

    def _placed(self) -> Iterator[PlacedBlock]:
        for stage in range(len(self.stages)):
            yield from self.blocks(stage)
        yield self.fused


def _convolved(name: str, width: int, kernel: int) -> Shapes:
    return {f"{name}.conv.weight": (width, 1, kernel, kernel), f"{name}.bn.weight": (width,)}


SeeingConfig = VisionConfig | MobileConfig


_MAP_EDGE = 16
_SMALLEST_EDGE = 16 * _MAP_EDGE  # a place of the last stage but one is so many pixels of 16


def _attending(width: int, attention: QueryBlock, times: int) -> tuple[Block, ...]:
    return (attention, InvertedBlock(width, expansion=2)) * times


ARCHITECTURES: dict[str, tuple[tuple[Block, ...], ...]] = {
    "mobilenetv5_300m_enc": (
        (EdgeBlock(128, 2), EdgeBlock(128), EdgeBlock(128)),
        (
            InvertedBlock(256, 2, first=3, middle=5, expansion=6),
            *(InvertedBlock(256, first=5), InvertedBlock(256, first=3)) * 2,
        ),
        (
            InvertedBlock(640, 2, first=5, middle=5, expansion=6),
            *(InvertedBlock(640, first=5),) * 7,
            InvertedBlock(640, expansion=1),
            *_attending(640, QueryBlock(640, 12, 64, key_stride=2), 14),
        ),
        (InvertedBlock(1280, 2, first=5, middle=5, expansion=6), *_attending(1280, QueryBlock(1280, 16, 96), 19)),
    )
}


def read_mobile(fields: JsonFields, images: JsonFields) -> MobileConfig | None:
    """Read Gemma 3n's encoder; None: another one, or a checkpoint of the text part alone."""
    tower, text = fields.section("vision_config"), section_of(fields, "text_config")
    stages = None if tower is None else ARCHITECTURES.get(tower.text("architecture", "mobilenetv5_300m_enc"))
    if tower is None or stages is None or tower.has("model_args"):
        return None
    edge = section_of(images, "size").integer("height", 1, MAX_EDGE, 768)
    check_square(images, edge)
    if edge % _SMALLEST_EDGE:
        raise images.error("size", f"must be multiples of {_SMALLEST_EDGE}")
    if fields.integer("vision_soft_tokens_per_image", 1, MAX_WIDTH, _MAP_EDGE**2) != _MAP_EDGE**2:
        raise UnsupportedModel(f"{fields.where}: vision_soft_tokens_per_image other than {_MAP_EDGE**2}.")
    first_mark = tower.integer("vocab_offset", 1, MAX_VOCABULARY, 262144)
    num_marks = tower.integer("vocab_size", 1, MAX_VOCABULARY, 128)
    end = fields.integer("eoi_token_id", first_mark, first_mark + num_marks - 1, 262144)
    token_id = fields.integer("image_token_id", 0, MAX_VOCABULARY, 262145)
    if token_id < text.integer("vocab_size_per_layer_input", 1, MAX_VOCABULARY, 262144):
        raise UnsupportedModel(f"{fields.where}: an image_token_id that has layer embeddings is not supported.")
    scaling = read_scaling(images, (HALVES, HALVES))
    if not images.flag("do_normalize", True):
        scaling = Scaling(scaling.rescale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return MobileConfig(
        form=FixedForm(
            token_id=token_id,
            edge=edge,
            tokens=_MAP_EDGE**2 + 1,
            scaling=scaling,
            resample=images.integer("resample", 0, 5, 2),
        ),
        stages=stages,
        stem_width=64,
        hidden_size=tower.integer("hidden_size", 1, MAX_WIDTH, 2048),
        out_width=text.integer("hidden_size", 1, MAX_WIDTH, 2048),
        num_marks=num_marks,
        end_mark=end - first_mark,
        eps=tower.number("rms_norm_eps", 0.0, 1.0, 1e-6),
    )
