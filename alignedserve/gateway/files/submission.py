"""Makes the batches of other APIs than Files, each from requests of its own (see `api/own_batches.py`)."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import orjson

from alignedserve.batches.records import Endpoint
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.gateway.files.files_api import INPUT_PURPOSE, FilesApi, new_file_id
from alignedserve.gateway.files.schemas import CreateBatchRequest, ExpiresAfter
from alignedserve.gateway.files.uploads import Upload

WINDOW = "24h"


def input_line(custom_id: str, endpoint: Endpoint, body: dict[str, Any]) -> bytes:
    """Return a line of a batch's input file."""
    line = {"custom_id": custom_id, "method": "POST", "url": endpoint.value, "body": body}
    return orjson.dumps(line) + b"\n"


async def submit_lines(
    files_api: FilesApi,
    owner: str,
    lines: Sequence[bytes],
    endpoint: Endpoint,
    *,
    name: str = "",
    results_expire: ExpiresAfter | None = None,
) -> BatchSnapshot:
    """Create the batch that runs these lines within a day. Raises InvalidRequest, QuotaExceeded, StorageFull."""
    content, file_id = b"".join(lines), new_file_id()
    blob = await files_api.stores.blobs.begin(file_id)
    try:
        await blob.write(content)
        digest = blake2b(content, digest_size=16).hexdigest()
        upload = Upload(blob, name, len(content), len(lines), digest, {"purpose": INPUT_PURPOSE})
        record = await files_api.add_file(owner, file_id, upload)
    finally:
        await blob.discard()
    asked = CreateBatchRequest(
        input_file_id=record.file_id,
        endpoint=endpoint.value,
        completion_window=WINDOW,
        output_expires_after=results_expire,
    )
    return await files_api.create(owner, asked, None)
