"""Names of models on a Hugging Face hub, as users write them: ORG/NAME, with a GGUF quantisation and a revision."""

import re
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from alignedserve.core.errors import ConfigError

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
    found = next((match for match in matches if match is not None), None)
    if found is None or _is_forbidden(found["repo_id"]) or ".." in (found["revision"] or ""):
        raise ConfigError(f"{text!r} is not the name of a model on a hub, {FORM}, or a short one (docs/models.md)")
    return HubName(found["repo_id"], found["revision"], found["quantization"])


def names_hub_model(text: str) -> bool:
    """Return whether this names a model on a hub, and neither a file or folder that is here nor a file's path."""
    if Path(text).exists():
        return False
    try:
        name = parse_hub_name(text)
    except ConfigError:
        return False
    return not name.repo_id.endswith(_FILE_SUFFIXES)


def _is_forbidden(repo_id: str) -> bool:
    return len(repo_id) > _MAX_REPO_ID_LEN or "--" in repo_id or ".." in repo_id or repo_id.endswith(".git")
