"""Reads how Gemma 3n sees: an encoder that its config names, and no more."""

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.hf_fields import MAX_VOCABULARY, MAX_WIDTH
from plugins.vision.forms import FixedForm, Scaling
from plugins.vision.mobile_config import Block, EdgeBlock, InvertedBlock, MobileConfig, QueryBlock
from plugins.vision.tower_fields import HALVES, MAX_EDGE, check_square, read_scaling, section_of

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
