"""Models in huggingface_hub's cache: which there are, whole or half, and their removal."""

import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.file_download import repo_folder_name

from alignedserve.core.errors import ModelError, ModelNotFound, StorageError
from alignedserve.gguf.file import SUFFIX, part_names
from alignedserve.runtime.model.hub.file_choice import HubName
from alignedserve.runtime.model.weight_index import INDEX_NAME, PICKLE_SUFFIXES, SINGLE_NAME, listed_shards

_FOLDER_PREFIX = "models--"
_INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One revision of a model in the cache, or, without a commit, unfinished files without a revision."""

    repo_id: str
    commit: str | None
    revisions: tuple[str, ...]  # branches and tags that meant it when last asked for
    num_bytes: int
    weights: str  # what `serve` would find
    path: Path


def list_models(cache: Path | None = None) -> list[CachedModel]:
    """Return every revision of every model in the cache, by name; also models that other programs downloaded."""
    cache = cache or Path(constants.HF_HUB_CACHE)
    with contextlib.suppress(CacheNotFound):
        repos = [repo for repo in scan_cache_dir(cache).repos if repo.repo_type == "model"]
        models = [_describe(repo, revision) for repo in repos for revision in repo.revisions]
        models += _halves_alone(cache, {repo.repo_path.name for repo in repos if repo.revisions})
        return sorted(models, key=lambda model: (model.repo_id, model.revisions, model.commit or ""))
    return []


def remove_model(name: HubName, cache: Path | None = None) -> int:
    """Remove a model, or its named revision, but nothing that other revisions share. Returns the freed bytes. Raises
    ModelNotFound, StorageError."""
    cache = cache or Path(constants.HF_HUB_CACHE)
    models = [model for model in list_models(cache) if model.repo_id == name.repo_id]
    removed = [model for model in models if name.revision is None or name.revision in (model.commit, *model.revisions)]
    if not removed:
        raise ModelNotFound(f"{name} is not in {cache}.")
    folder = cache / repo_folder_name(repo_id=name.repo_id, repo_type="model")
    before = _num_bytes_in(folder)
    try:
        commits = [model.commit for model in removed if model.commit is not None]
        if commits:
            _only(scan_cache_dir(cache), name.repo_id).delete_revisions(*commits).execute()
        if len(removed) == len(models) and folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(f"{name} cannot be removed from {folder}: {error.strerror}.") from error
    return before - _num_bytes_in(folder)


def _only(cache: HFCacheInfo, repo_id: str) -> HFCacheInfo:
    return replace(
        cache, repos=frozenset(repo for repo in cache.repos if (repo.repo_type, repo.repo_id) == ("model", repo_id))
    )


def _describe(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> CachedModel:
    weights = _describe_weights(revision.snapshot_path)
    parts = (repo.repo_path / "blobs").glob("*.incomplete") if weights.endswith(_INCOMPLETE) else ()
    halves = sum(path.stat().st_size for path in parts)
    return CachedModel(
        repo_id=repo.repo_id,
        commit=revision.commit_hash,
        revisions=tuple(sorted(revision.refs)),
        num_bytes=revision.size_on_disk + halves,
        weights=weights,
        path=revision.snapshot_path,
    )


def _halves_alone(cache: Path, whole: set[str]) -> list[CachedModel]:
    return [
        CachedModel(
            repo_id=folder.name.removeprefix(_FOLDER_PREFIX).replace("--", "/"),
            commit=None,
            revisions=_refs_in(folder / "refs"),
            num_bytes=_num_bytes_in(folder),
            weights=_INCOMPLETE,
            path=folder,
        )
        for folder in cache.glob(f"{_FOLDER_PREFIX}*")
        if folder.is_dir() and folder.name not in whole
    ]


def _refs_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))


def _describe_weights(snapshot: Path) -> str:
    gguf = sorted(snapshot.rglob(f"*{SUFFIX}"))
    if gguf:
        return ", ".join(_describe_gguf(path) for path in gguf if _is_first(path)) or _INCOMPLETE
    if any((snapshot / name).exists() for name in (INDEX_NAME, SINGLE_NAME)):
        try:
            return "safetensors" if all(path.exists() for path in listed_shards(snapshot)) else _INCOMPLETE
        except ModelError:
            return "damaged"
    if any(path.suffix in PICKLE_SUFFIXES for path in snapshot.iterdir()):
        return "pickle, not served"
    return _INCOMPLETE if (snapshot / "config.json").exists() else "none"


def _is_first(path: Path) -> bool:
    with contextlib.suppress(ModelError):
        return path.name == part_names(path.name)[0]
    return False


def _describe_gguf(path: Path) -> str:
    parts = [path.with_name(name) for name in part_names(path.name)]
    shown = path.name if len(parts) == 1 else f"{path.name} and {len(parts) - 1} more"
    return shown if all(part.exists() for part in parts) else f"{path.name} {_INCOMPLETE}"


def _num_bytes_in(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
