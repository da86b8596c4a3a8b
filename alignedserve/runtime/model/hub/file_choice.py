"""The files of a repository that serving needs: safetensors before all other weights, one GGUF model, never pickle."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from typing_extensions import override

from alignedserve.core.errors import ConfigError, ModelNotFound, UnsafeWeights, UnsupportedModel
from alignedserve.gguf.file import part_names
from alignedserve.runtime.model.weight_index import INDEX_NAME, PICKLE_SUFFIXES, SINGLE_NAME

FORM = "ORG/NAME[:QUANTISATION][@REVISION]"

_MAX_REPO_ID_LEN = 96  # the hub's own limit
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_QUANTISATION = r":(?P<quantization>[A-Za-z0-9][A-Za-z0-9._-]{0,127})"
_REVISION = r"@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,199})"
_FORMS = tuple(
    re.compile(rf"(?P<repo_id>{_WORD}/{_WORD}){options}")
    for options in (rf"(?:{_QUANTISATION})?(?:{_REVISION})?", rf"{_REVISION}{_QUANTISATION}")
)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, one of its revisions and, of GGUF files, one quantisation or file name."""

    repo_id: str
    revision: str | None = None  # branch, tag or commit; the hub's main branch when unset
    quantization: str | None = None  # such as Q4_K_M

    @override
    def __str__(self) -> str:
        quantization = f":{self.quantization}" if self.quantization else ""
        return f"{self.repo_id}{quantization}{f'@{self.revision}' if self.revision else ''}"


def parse_hub_name(text: str) -> HubName:
    """Parse ORG/NAME[:QUANTISATION][@REVISION]. Raises ConfigError."""
    matches = (form.fullmatch(text) for form in _FORMS)
    matched = next((match for match in matches if match is not None), None)
    repo_id = "" if matched is None else matched["repo_id"]
    is_forbidden = len(repo_id) > _MAX_REPO_ID_LEN or "--" in repo_id or ".." in repo_id or repo_id.endswith(".git")
    if matched is None or is_forbidden or ".." in (matched["revision"] or ""):
        raise ConfigError(f"{text!r} is not the name of a model on a hub, {FORM}, or a short one (docs/models.md)")
    return HubName(matched["repo_id"], matched["revision"], matched["quantization"])


def names_hub_model(text: str) -> bool:
    """Return whether this names a model on a hub, and neither a file or folder that is here nor a file's path."""
    if Path(text).exists():
        return False
    try:
        name = parse_hub_name(text)
    except ConfigError:
        return False
    return not name.repo_id.endswith(_FILE_SUFFIXES)


DEFAULT_QUANTISATION = "Q4_K_M"
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.jinja2",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    INDEX_NAME,
    "modules.json",  # this and the next two: of sentence-transformers
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
_MODULE_FILE = re.compile(r"\d{1,2}_[A-Za-z]{1,32}/(config\.json|model\.safetensors)")  # of what follows an encoder
_REQUIRED = ("config.json", "tokenizer.json")
_OTHER_GGUF = re.compile(r"(^|[-._])(mmproj|imatrix)[-._]", re.IGNORECASE)  # of images; of a quantiser
_PART_OF_SEVERAL = re.compile(r"-(?P<number>\d{5})-of-\d{5}\.gguf$")
_MAX_SHOWN = 12


def wants_gguf(name: HubName, listed: Collection[str]) -> bool:
    """Return whether the weights come from a GGUF file: the name wants one, or there is nothing better."""
    return name.quantization is not None or (not _has_safetensors(listed) and bool(_gguf_files(listed)))


def choose_text_files(name: HubName, listed: Collection[str]) -> list[str]:
    """Return config, tokenizer, chat template, weight index and modules, as far as they exist. Raises UnsafeWeights,
    ModelNotFound, UnsupportedModel where weights, config.json or tokenizer.json are missing: nothing is downloaded
    then."""
    if not _has_safetensors(listed):
        _refuse_weights(name, listed)
    missing = [file for file in _REQUIRED if file not in listed]
    if missing:
        raise UnsupportedModel(f"{name} has no {missing[0]}; it cannot be served without.")
    modules = sorted(file for file in listed if _MODULE_FILE.fullmatch(file))
    return [*(file for file in TEXT_FILES if file in listed), *modules]


def choose_gguf(name: HubName, listed: Collection[str]) -> list[str]:
    """Return the GGUF file of a quantisation or of a file's name, with all its parts; without a name Q4_K_M, or the
    only file. Raises ModelNotFound naming the existing files, or the missing part."""
    files = _gguf_files(listed)
    if name.quantization is None:
        matching = _of_quantisation(DEFAULT_QUANTISATION, files) or files
    else:
        matching = _of_quantisation(name.quantization, files)
    if len(matching) != 1:
        raise _wrong_number(name, matching, files)
    parts = part_names(matching[0])
    missing = [part for part in parts if part not in listed]
    if missing:
        raise ModelNotFound(f"{name} has no {missing[0]}, a part of the model in {matching[0]}.")
    return parts


def _has_safetensors(listed: Collection[str]) -> bool:
    return SINGLE_NAME in listed or INDEX_NAME in listed


def _gguf_files(listed: Collection[str]) -> list[str]:
    files = [file for file in sorted(listed) if file.endswith(".gguf") and file.count("/") < 2]
    return [file for file in files if _is_first(file) and not _OTHER_GGUF.search(file)]


def _is_first(file: str) -> bool:
    part = _PART_OF_SEVERAL.search(file)
    return part["number"] == "00001" if part else "/" not in file


def _of_quantisation(wanted: str, files: list[str]) -> list[str]:
    named = [file for file in files if wanted in (file, PurePosixPath(file).name)]
    if named:
        return named
    form = re.compile(rf"(^|[-._]){re.escape(wanted)}([-.]|$)", re.IGNORECASE)
    return [file for file in files if form.search(PurePosixPath(file).stem)]


def _wrong_number(name: HubName, matching: list[str], files: list[str]) -> ModelNotFound:
    if matching:
        return ModelNotFound(
            f"{name} has several GGUF files; name one of them, as in {name.repo_id}:{PurePosixPath(matching[0]).name}: "
            f"{_shown(files)}."
        )
    return ModelNotFound(f"{name} is not there; {name.repo_id} has {_shown(files) or 'no GGUF file'}.")


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
