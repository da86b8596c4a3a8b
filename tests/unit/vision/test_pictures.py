"""Models that see against transformers: pixels, embeddings, logits and answers are equal."""

import io
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from alignedserve.core.ids import RequestId
from alignedserve.core.picture import Picture, PictureRun, picture_digest
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import AUTO, TORCH
from alignedserve.runtime.engine.engine import NewSequence
from alignedserve.runtime.pictures import RopePlaces, SequenceEmbeddings, rope_places
from plugins.vision.decoder import Decoded, DecodingTask, Pixels
from plugins.vision.decoding import decode
from plugins.vision.families import VISION_FAMILIES, read_vision
from plugins.vision.forms import BudgetForm, CanvasForm, CellsForm, PictureForm, RowsForm, Size, SquareForm, TiledForm
from plugins.vision.tower import VisionTower
from plugins.vision.vision_config import VisionConfig
from plugins.vision.vision_weights import load_vision_weights
from tests.support.models.tiny_engines import LogitsProbe, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_vision import IMAGE, TINY_SEEING, llama4_tiles, make_tiny_seeing, picture, processed

SIZES = [(23, 40), (40, 23), (32, 32), (7, 7), (90, 3), (16, 16)]
FILES = (picture(23, 40), picture(30, 30, seed=1))
CPU = torch.device("cpu")


BOTH_WAYS = {"gemma4-both-ways": {"use_bidirectional_attention": "vision", "sliding_window": 80}}


@pytest.fixture(scope="module", params=[*TINY_SEEING, *BOTH_WAYS])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder, family = tmp_path_factory.mktemp(request.param), request.param.partition("-")[0]
    return family, folder, make_tiny_seeing(folder, family, **BOTH_WAYS.get(request.param, {}))


def config_of(family: str, folder: Path) -> VisionConfig:
    config = read_vision(folder, family)
    assert isinstance(config, VisionConfig), f"{family} does not see"
    return config


def parts_of(file: bytes, config: VisionConfig) -> list[Pixels]:
    decoded = decode(file, DecodingTask(1 << 20, config.form))
    assert isinstance(decoded, Decoded), decoded
    whole = np.frombuffer(decoded.pixels, np.uint8)
    return list(whole.reshape(len(decoded.shapes), 3, *decoded.shapes[0]))


@torch.inference_mode()
def embeddings_of(file: bytes, tower: VisionTower) -> torch.Tensor:
    results = []
    for part in parts_of(file, tower.config):
        steps = tower.steps(part)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                results.append(ended.value)
                break
    return torch.cat(results)


def test_pixels_and_prompts_are_those_of_the_models_processor(made: tuple[str, Path, Any]) -> None:
    family, folder, _ = made
    config = config_of(family, folder)
    form, scaling = config.form, config.form.scaling
    mean, deviation = (np.array(rgb)[:, None, None] for rgb in (scaling.mean, scaling.deviation))
    for width, height in SIZES:
        file, size = picture(width, height), Size(width, height)
        expected = processed(family, file)["pixel_values"]
        if isinstance(form, CellsForm):
            _, rows, columns = processed(family, file)["image_grid_thw"][0].tolist()
            expected = unfolded(expected, rows, columns, config)
        if isinstance(form, BudgetForm):
            expected = unpatched(processed(family, file), config.patch_size)
        expected = expected.reshape(-1, *expected.shape[-3:]).numpy()
        own = np.stack(parts_of(file, config)) * scaling.rescale
        atol = 4.5e-3 if scaling.is_short else 1e-6  # bfloat16 tells the 256 levels, 7.8e-3 apart, from one another
        np.testing.assert_allclose((own - mean) / deviation, expected, atol=atol)
        assert form.text(size) == expected_text(family, form, file, own)
        if family == "llama4":
            np.testing.assert_allclose(llama4_tiles(file, by_torch=True)[0], expected, atol=1.2e-2)  # a level, rounded
        token = form.token if isinstance(form, SquareForm | CanvasForm) else form.mark
        assert form.text(size).count(token) == form.num_tokens(size)


def unfolded(patches: torch.Tensor, rows: int, columns: int, config: VisionConfig) -> torch.Tensor:
    """Return the picture whose patches lie by cells, each a row of pixels of all frames, which are the same."""
    edge, join = config.patch_size, config.join
    grid = patches.view(rows // join, columns // join, join, join, 3, config.num_frames, edge, edge)
    assert torch.equal(grid[..., 0, :, :], grid[..., 1, :, :])
    return grid[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * edge, columns * edge)


def unpatched(made: Any, edge: int) -> torch.Tensor:
    """Return the picture whose patches are rows of pixels, each of all channels, with padding behind them."""
    places = made["image_position_ids"][0]
    columns, rows = (places.max(0).values + 1).tolist()
    grid = made["pixel_values"][0, : rows * columns].view(rows, columns, edge, edge, 3)
    whole: torch.Tensor = grid.permute(4, 0, 2, 1, 3).reshape(3, rows * edge, columns * edge)
    return 2.0 * whole - 1.0


def expected_text(family: str, form: PictureForm, file: bytes, parts: Any) -> str:
    """Return what transformers puts into the prompt; Pixtral's processor itself needs torchvision."""
    if isinstance(form, CellsForm):
        return form.mark * int(parts.shape[-2] * parts.shape[-1] // form.cell_edge**2)
    if isinstance(form, SquareForm):
        return f"\n\n{form.mark}{form.token * 16}{form.end}\n\n"
    if isinstance(form, BudgetForm):
        return f"{form.start}{form.mark * int(parts.shape[-2] * parts.shape[-1] // form.cell_edge**2)}{form.end}"
    if isinstance(form, CanvasForm):
        rows, columns = llama4_tiles(file)[1]
        tiles = (form.token * 4 + form.column_end) * columns
        lines = (tiles.removesuffix(form.column_end) + form.row_end) * rows if len(parts) > 1 else ""
        return f"{form.start}{lines}{form.mark}{form.token * 4}{form.end}"
    if isinstance(form, RowsForm):
        rows, columns = (edge // form.cell_edge for edge in parts.shape[-2:])
        tokens = ([form.mark] * columns + [form.row_end]) * rows
        return "".join([*tokens[:-1], form.end])
    assert isinstance(form, TiledForm), f"a form of no family: {form}"
    found = processed(family, file, return_row_col_info=True)
    text_of = import_module("transformers.models.smolvlm.processing_smolvlm").get_image_prompt_string
    marks = (form.fence, form.mark, form.whole)
    return str(text_of(found["rows"][0][0], found["cols"][0][0], form.tile_tokens, *marks))


def test_embeddings_logits_and_answers_equal_transformers(made: tuple[str, Path, Any]) -> None:
    family, folder, reference = made
    config = config_of(family, folder)
    tower = VisionTower(config, load_vision_weights(folder, config, torch.float32, CPU), torch.float32, CPU)
    outside = ("text_model", "language_model", "lm_head")
    sees = [one.numel() for name, one in reference.named_parameters() if not any(part in name for part in outside)]
    assert config.num_parameters == sum(sees)
    own = [embeddings_of(file, tower) for file in FILES]
    words = random_tokens(3, 30, 190)
    prompt = [*words[:9], *[IMAGE] * len(own[0]), *words[9:20], *[IMAGE] * len(own[1]), *words[20:]]
    pictures = SequenceEmbeddings(np.flatnonzero(np.array(prompt) == IMAGE), torch.cat(own))
    places = places_of(prompt, config)
    runs = whole_runs_of(prompt, *map(len, own)) if config.form.is_whole else ()
    answer = generated(folder, prompt, pictures, places, runs)
    with torch.no_grad():
        given = processed(family, *FILES)
        features = features_of(family, reference, given)
        ids = torch.tensor([[*prompt, *answer]])
        kinds_of = {"gemma3": "token_type_ids"}.get(family, "mm_token_type_ids")
        kinds = {kinds_of: (ids == IMAGE).int()} if places is not None or runs else {}
        logits = reference(ids, **given, **kinds).logits[0].double()
    torch.testing.assert_close(torch.cat(own), features, rtol=1e-4, atol=1e-5)
    assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    for attention in (AUTO, TORCH):
        probe = LogitsProbe(tiny_decoder(folder), attention=attention)
        probe.add("a", prompt, pictures=pictures, places=places, whole_runs=runs)
        probe.add("b", words)
        for counts in ({"a": 11, "b": 5}, {"a": 1}, {"a": 1, "b": 9}, {"a": len(prompt) - 13, "b": 1}):  # in chunks
            probe.step(**counts)
        torch.testing.assert_close(probe.logits("a").double(), logits[: len(prompt)], rtol=0.0, atol=1e-4)


def features_of(family: str, reference: Any, given: Any) -> torch.Tensor:
    """Return the embeddings of pictures by transformers, and behind them what inner layers add."""
    if family == "llama4":
        features: torch.Tensor = reference.multi_modal_projector(
            reference.get_image_features(**given).last_hidden_state
        ).flatten(0, 1)
        return features
    seen = reference.model.get_image_features(**given)
    deep = getattr(seen, "deepstack_features", None) or ()
    return torch.cat([torch.cat(list(level)) for level in (seen.pooler_output, *deep)], 1)


def places_of(prompt: list[int], config: VisionConfig) -> RopePlaces | None:
    """Return the places of the prompt's tokens, where the model knows rows and columns."""
    shown, at = [], 0
    for file in FILES:
        size = Size(*Image.open(io.BytesIO(file)).size)
        grid, count = config.form.position_grid(size), config.form.num_tokens(size)
        if grid is None:
            return None
        first = prompt.index(IMAGE, at)
        at = first + count
        shown.append(Picture(file, picture_digest(file), ((first, count),), grid))
    return rope_places(len(prompt), shown)


def whole_runs_of(prompt: list[int], *lengths: int) -> tuple[PictureRun, ...]:
    first, second = prompt.index(IMAGE), len(prompt) - prompt[::-1].index(IMAGE) - lengths[1]
    return (first, lengths[0]), (second, lengths[1])


def generated(
    folder: Path,
    prompt: list[int],
    pictures: SequenceEmbeddings,
    places: RopePlaces | None,
    runs: tuple[PictureRun, ...],
) -> list[int]:
    tiny = TinyEngine(tiny_decoder(folder))
    tiny.blocks["a"] = blocks = tiny.take_blocks(len(prompt) + 30)
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    own = (RequestId("a"), tuple(prompt), len(prompt), 0, blocks, sampling)
    tiny.engine.add_sequence(NewSequence(*own, pictures=pictures, places=places, whole_runs=runs))
    if runs:  # of which slices that end inside compute nothing
        assert [tiny.step(a=count).sampled for count in (9 + 3, 5, 20)] == [[], [], []]
        tiny.step(a=len(prompt) - 37)
        for _ in range(23):
            tiny.step(a=1)
    else:
        tiny.generate("a", 24)
    return tiny.tokens("a")[len(prompt) :]


def test_every_family_that_sees_is_compared() -> None:
    assert set(VISION_FAMILIES) == {*TINY_SEEING, "gemma3n"}  # see test_mobile_tower.py
