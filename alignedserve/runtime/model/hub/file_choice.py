"""The files of a repository that serving needs: safetensors before all other weights, one GGUF file, never pickle."""

import re
from collections.abc import Collection
from pathlib import PurePosixPath

from alignedserve.core.errors import ModelNotFound, UnsafeWeights, UnsupportedModel
from alignedserve.runtime.model.hub.hub_name import HubName
from alignedserve.runtime.model.weight_index import INDEX_NAME, PICKLE_SUFFIXES, SINGLE_NAME

DEFAULT_QUANTISATION = "Q4_K_M"
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.jinja2",
    INDEX_NAME,
)
_REQUIRED = ("config.json", "tokenizer.json")
_OTHER_GGUF = re.compile(r"(^|[-._])(mmproj|imatrix)[-._]", re.IGNORECASE)  # of images; of a quantiser
_PART_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_MAX_SHOWN = 12


def wants_gguf(name: HubName, listed: Collection[str]) -> bool:
    """Return whether the weights are to come from a GGUF file: one is asked for, or there is nothing better."""
    return name.quantization is not None or (not _has_safetensors(listed) and bool(_gguf_files(listed)))


def choose_text_files(name: HubName, listed: Collection[str]) -> list[str]:
    """Return config, tokenizer, chat template and weight index, as far as they are there.

    Raises UnsafeWeights when the repository has weights in a pickle format only, ModelNotFound or UnsupportedModel
    when it lacks weights, config.json or tokenizer.json. So nothing is downloaded of what cannot be served.
    """
    if not _has_safetensors(listed):
        _refuse_weights(name, listed)
    missing = [file for file in _REQUIRED if file not in listed]
    if missing:
        raise UnsupportedModel(f"{name} has no {missing[0]}; it cannot be served without.")
    return [file for file in TEXT_FILES if file in listed]


def choose_gguf(name: HubName, listed: Collection[str]) -> str:
    """Return the GGUF file of the quantisation asked for, which may be a file's name as well.

    When none is named: Q4_K_M, or the only file. Raises ModelNotFound naming the files that there are.
    """
    files = _gguf_files(listed)
    if name.quantization is None:
        found = _of_quantisation(DEFAULT_QUANTISATION, files) or files
    else:
        found = _of_quantisation(name.quantization, files)
    if len(found) != 1:
        raise ModelNotFound(f"{name} {_wrong_number(found)}; it has {_shown(files) or 'no GGUF file'}.")
    if _PART_OF_SEVERAL.search(found[0]):
        raise UnsupportedModel(f"{name} is split into several GGUF files, which are not read: {found[0]}.")
    return found[0]


def _has_safetensors(listed: Collection[str]) -> bool:
    return SINGLE_NAME in listed or INDEX_NAME in listed


def _gguf_files(listed: Collection[str]) -> list[str]:
    """Return GGUF files of weights; of one that is split only its first part."""
    files = [file for file in sorted(listed) if file.endswith(".gguf") and "/" not in file]
    parts = [file for file in files if _PART_OF_SEVERAL.search(file) and "-00001-of-" not in file]
    return [file for file in files if file not in parts and not _OTHER_GGUF.search(file)]


def _of_quantisation(wanted: str, files: list[str]) -> list[str]:
    if wanted in files:
        return [wanted]
    form = re.compile(rf"(^|[-._]){re.escape(wanted)}([-.]|$)", re.IGNORECASE)
    return [file for file in files if form.search(file.removesuffix(".gguf"))]


def _wrong_number(found: list[str]) -> str:
    return "names several files" if found else "is not there"


def _refuse_weights(name: HubName, listed: Collection[str]) -> None:
    pickles = sorted(file for file in listed if PurePosixPath(file).suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UnsafeWeights(
            f"{name} has weights only as {pickles[0]}, a pickle format that can run code when loaded; "
            "look for a repository or a revision with safetensors."
        )
    raise ModelNotFound(f"{name} has neither {SINGLE_NAME} nor {INDEX_NAME}; it has {_shown(sorted(listed))}.")


def _shown(files: list[str]) -> str:
    more = len(files) - _MAX_SHOWN
    return ", ".join(files[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
