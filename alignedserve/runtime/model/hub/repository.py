"""Models on a Hugging Face hub, fetched into huggingface_hub's cache: only what serving needs, gone on with after a
kill, found again without a network.

Address, token, cache and offline mode are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE)."""

import contextlib
import errno
import glob
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub import HfApi, RepoFile, constants
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # documented, and exported without saying so

from alignedserve.core.errors import AlignedServeError, ModelError, ModelNotFound, StorageError, StorageFull
from alignedserve.runtime.model.hub.file_choice import HubName, choose_gguf, choose_text_files, wants_gguf
from alignedserve.runtime.model.hub.resumed_download import Download, RemoteFile
from alignedserve.runtime.model.model_files import read_any_config
from alignedserve.runtime.model.weight_index import INDEX_NAME, SINGLE_NAME, listed_shards

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_SHOWN = 200
Report = Callable[[int, int], None]  # bytes that are here, of how many

_NUM_CONNECTIONS = 4
_TIMEOUT_S = 20.0


class Hub:
    """A hub, and the cache of its files. Unset arguments are huggingface_hub's, from the environment."""

    def __init__(self, *, endpoint: str | None = None, cache: Path | None = None, token: str | None = None) -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._cache = cache or Path(constants.HF_HUB_CACHE)
        self._token = token
        self._api = HfApi(endpoint=self.endpoint, token=token)

    def fetch(self, name: HubName, report: Report | None = None, *, has_weights: bool = True) -> Path:
        """Return the folder of a model, or its GGUF file (the first part), downloading what is missing. Several
        processes may do so at once; a killed one is continued. `has_weights=False` leaves safetensors out. Raises
        ModelError and its kinds, StorageFull."""
        with explained(name, self.endpoint):
            commit = self._resolve(name)
            sizes = self._list(name, commit)
            if wants_gguf(name, sizes):
                parts = choose_gguf(name, sizes)
                return self._complete(name, commit, {part: sizes[part] for part in parts}, report) / parts[0]
            text_files = choose_text_files(name, sizes)
            folder = self._link(name, commit, text_files)
            read_any_config(folder)  # refused, if so, before the weights have come
            if not has_weights:
                return folder
            files = [path.name for path in listed_shards(folder)] if SINGLE_NAME not in sizes else [SINGLE_NAME]
            missing = [file for file in files if file not in sizes]
            if missing:
                raise ModelNotFound(f"{name} has no {missing[0]}, which its {INDEX_NAME} names.")
            return self._complete(name, commit, ({file: sizes[file] for file in files}), report)

    def _resolve(self, name: HubName) -> str:
        return self._api.resolve_revision(
            name.repo_id, revision=name.revision, cache_dir=self._cache, local_files_only=constants.is_offline_mode()
        ).resolved

    def _list(self, name: HubName, commit: str) -> dict[str, int]:
        try:
            listed: list[Any] = huggingface_hub.get_cached_repo_tree(
                name.repo_id, revision=commit, cache_dir=self._cache
            )
        except CachedRepoTreeNotFoundError:
            if constants.is_offline_mode():
                return self._list_folder(name, commit)
            listed = list(self._api.list_repo_tree(name.repo_id, recursive=True, revision=commit))
        return {file.path: file.size for file in listed if isinstance(file, RepoFile)}

    def _list_folder(self, name: HubName, commit: str) -> dict[str, int]:
        folder = self._folder(name, commit)
        if not folder.is_dir():
            raise ModelNotFound(f"{name} is not downloaded, or not completely, and HF_HUB_OFFLINE is set.")
        return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    def _complete(self, name: HubName, commit: str, sizes: dict[str, int], report: Report | None) -> Path:
        missing = [file for file in sizes if not (self._folder(name, commit) / file).exists()]
        if missing:
            if constants.is_offline_mode():
                raise ModelNotFound(f"{name} is only half downloaded, without {missing[0]}, and HF_HUB_OFFLINE is set.")
            self._download(name, commit, {file: sizes[file] for file in missing}, report)
        return self._link(name, commit, list(sizes))

    def _link(self, name: HubName, commit: str, files: list[str]) -> Path:
        folder = self._folder(name, commit)
        if all((folder / file).exists() for file in files):
            return folder
        huggingface_hub.snapshot_download(
            name.repo_id,
            revision=commit,
            allow_patterns=[glob.escape(file) for file in files],
            cache_dir=self._cache,
            endpoint=self.endpoint,
            token=self._token,
            etag_timeout=_TIMEOUT_S,
            tqdm_class=_NoBar,
        )
        missing = [file for file in files if not (folder / file).exists()]
        if missing:
            raise ModelNotFound(f"{name} is only half downloaded, without {missing[0]}, and {self.endpoint} fails.")
        return folder

    def _download(self, name: HubName, commit: str, sizes: dict[str, int], report: Report | None) -> None:
        blobs = self._folder(name, commit).parent.parent / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        stop, counted = threading.Event(), _ByteCount(sum(sizes.values()), report)
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            try:
                files = list(pool.map(lambda file: self._look_up(name, commit, file, sizes[file]), sizes))
                _check_space(name, files, blobs)
                downloads = [Download(file, blobs, count=counted.add, stop=stop, token=self._token) for file in files]
                for ended in as_completed([pool.submit(download.run) for download in downloads]):
                    ended.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _look_up(self, name: HubName, commit: str, file: str, num_bytes: int) -> RemoteFile:
        url = huggingface_hub.hf_hub_url(name.repo_id, file, revision=commit, endpoint=self.endpoint)
        metadata = huggingface_hub.get_hf_file_metadata(
            url, token=self._token, timeout=_TIMEOUT_S, endpoint=self.endpoint, retry_on_errors=True
        )
        return RemoteFile(url, metadata.etag or "", num_bytes)

    def _folder(self, name: HubName, commit: str) -> Path:
        return self._cache / repo_folder_name(repo_id=name.repo_id, repo_type="model") / "snapshots" / commit


class _ByteCount:
    def __init__(self, total: int, report: Report | None) -> None:
        self._num_bytes, self._total, self._report = 0, total, report
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes += num_bytes
            if self._report is not None:
                self._report(self._num_bytes, self._total)


class _NoBar(tqdm):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]


def _check_space(name: HubName, files: list[RemoteFile], blobs: Path) -> None:
    needed = sum(file.num_bytes - file.num_bytes_in(blobs) for file in files)
    free = shutil.disk_usage(blobs).free
    if needed > free:
        raise StorageFull(
            f"{name} needs {needed / 1e6:.0f} MB more, and {blobs} has {free / 1e6:.0f} MB left; "
            "HF_HOME names another folder, `alignedserve models rm` removes models."
        )


@contextlib.contextmanager
def explained(name: HubName, endpoint: str) -> Iterator[None]:
    try:
        yield
    except AlignedServeError:
        raise
    except (httpx2.HTTPError, RevisionResolutionError, HFValidationError, OSError) as error:
        raise _translated(error, name, endpoint) from error


def _translated(error: Exception, name: HubName, endpoint: str) -> AlignedServeError:
    match error:
        case GatedRepoError():
            return ModelError(
                f"{name.repo_id} is gated: accept its licence on {endpoint}/{name.repo_id} and set HF_TOKEN to a token "
                "of the account that did."
            )
        case RevisionNotFoundError():
            return ModelNotFound(f"{name.repo_id} has no revision {name.revision or 'main'!r} on {endpoint}.")
        case RepositoryNotFoundError():
            return ModelNotFound(
                f"{name.repo_id} is neither a folder here nor a model on {endpoint}; check the spelling, or, if it is "
                "private, set HF_TOKEN to a token of an account that may read it."
            )
        case HfHubHTTPError():
            return _refusal(error.response.status_code, name, endpoint)
        case FileMetadataError():
            return ModelError(f"{endpoint} does not answer as a Hugging Face hub does; HF_ENDPOINT names another.")
        case httpx2.HTTPError() | LocalEntryNotFoundError() | RevisionResolutionError():
            if constants.is_offline_mode():
                return ModelNotFound(f"{name} is not downloaded, or not completely, and HF_HUB_OFFLINE is set.")
            cause = error.__cause__ or error
            return ModelNotFound(
                f"{name} is neither a folder here nor downloaded completely, and {endpoint} cannot be reached "
                f"({type(cause).__name__}: {str(cause).partition(chr(10))[0][:_MAX_SHOWN]}); what has come is kept."
            )
        case OSError():
            return _disk_error(error, name)
    return ModelNotFound(f"{name}: {str(error)[:_MAX_SHOWN]}")


def _refusal(status: int, name: HubName, endpoint: str) -> ModelError:
    if status == 401:
        return ModelError(f"{endpoint} refuses the token for {name.repo_id}: HF_TOKEN is wrong or has expired.")
    if status == 403:
        return ModelError(
            f"{endpoint} forbids {name.repo_id} to this token: HF_TOKEN needs the right to read it, and its licence, "
            f"if it has one, must be accepted on {endpoint}/{name.repo_id}."
        )
    return ModelError(f"{endpoint} answered {status} when asked for {name}; what has come is kept, try again later.")


def _disk_error(error: OSError, name: HubName) -> StorageError:
    if error.errno in _FULL:
        return StorageFull(
            f"The disk is full ({constants.HF_HUB_CACHE}) while {name} is downloaded; what has come is kept. HF_HOME "
            "names another folder, `alignedserve models rm` removes models."
        )
    return StorageError(f"{name} cannot be kept in {error.filename or constants.HF_HUB_CACHE}: {error.strerror}.")
