"""Errors of huggingface_hub, of its HTTP client and of the disk, as errors of our own that say what to do."""

import contextlib
import errno
from collections.abc import Iterator

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from alignedserve.core.errors import AlignedServeError, ModelError, ModelNotFound, StorageError, StorageFull
from alignedserve.runtime.model.hub.hub_name import HubName

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_SHOWN = 200


@contextlib.contextmanager
def explained(name: HubName, endpoint: str) -> Iterator[None]:
    """Raise ModelError, ModelNotFound or StorageFull for whatever fails inside."""
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
            return _unreachable(error, name, endpoint)
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


def _unreachable(error: Exception, name: HubName, endpoint: str) -> ModelNotFound:
    if constants.is_offline_mode():
        return ModelNotFound(f"{name} is not downloaded, or not completely, and HF_HUB_OFFLINE is set.")
    cause = error.__cause__ or error
    return ModelNotFound(
        f"{name} is neither a folder here nor downloaded completely, and {endpoint} cannot be reached "
        f"({type(cause).__name__}: {str(cause).partition(chr(10))[0][:_MAX_SHOWN]}); what has come is kept."
    )


def _disk_error(error: OSError, name: HubName) -> StorageError:
    if error.errno in _FULL:
        return StorageFull(
            f"The disk is full ({constants.HF_HUB_CACHE}) while {name} is downloaded; what has come is kept. HF_HOME "
            "names another folder, `alignedserve models rm` removes models."
        )
    return StorageError(f"{name} cannot be kept in {error.filename or constants.HF_HUB_CACHE}: {error.strerror}.")
