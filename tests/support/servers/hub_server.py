"""A Hugging Face hub on this machine: the routes that downloads use, and the ways in which they fail.

Large files redirect to a second address, as git LFS's do, which must never see a token. Real sockets, real ranges.
"""

import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from typing_extensions import override

MAIN = "main"
_LARGE = (".safetensors", ".gguf", ".bin")
_ROUTE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<kind>revision|tree)/(?P<revision>.+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass(slots=True)
class Repository:
    """Files of each commit, and the commits that branches and tags name."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    is_gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = MAIN) -> str:
        """Add a commit and let `ref` name it."""
        content = b"".join(name.encode() + body for name, body in sorted(files.items()))
        commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        self.files[commit] = files
        self.refs[ref] = commit
        return commit


@dataclass(frozen=True, slots=True)
class Seen:
    """A request, as it came."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    is_for_storage: bool  # at the second address


class HubServer:
    """Context manager. `token` is the only one that opens what is gated or private."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = "hf_right"
        self.requests: list[Seen] = []
        self.bytes_per_s: float = float("inf")  # of each large file
        self.holds_after: int | None = None  # bytes of each large file; the others come when it is None again
        self.cut_after: list[int] = []  # of the next answers with a large file: bytes, then the connection ends
        self.failures: list[int] = []  # statuses of the next answers with a large file
        self.on_bytes: Callable[[int], None] = lambda sent: None
        self.ignores_ranges = False
        self.damages = False  # every large file: right in length, wrong in content
        self._hub = _Server(self, is_storage=False)
        self._storage = _Server(self, is_storage=True)

    def add(self, repo_id: str, files: dict[str, bytes], **options: bool) -> Repository:
        """Add a repository with one commit."""
        repository = Repository(**options)  # type: ignore[arg-type]
        repository.commit(files)
        self.repositories[repo_id] = repository
        return repository

    @property
    def url(self) -> str:
        """Return the address to be used as HF_ENDPOINT."""
        return self._hub.url

    @property
    def storage_url(self) -> str:
        """Return the address of large files."""
        return self._storage.url

    def __enter__(self) -> Self:
        for server in (self._hub, self._storage):
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.holds_after = None
        for server in (self._hub, self._storage):
            server.shutdown()
            server.server_close()

    def downloads(self) -> list[Seen]:
        """Return the requests for contents of large files."""
        return [seen for seen in self.requests if seen.is_for_storage and seen.method == "GET"]

    def blob(self, digest: str) -> bytes | None:
        """Return the large file of this SHA-256."""
        for repository in self.repositories.values():
            for files in repository.files.values():
                for body in files.values():
                    if hashlib.sha256(body).hexdigest() == digest:
                        return body
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: HubServer, *, is_storage: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.is_storage = is_storage
        self.url = f"http://127.0.0.1:{self.server_port}"

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent: clients are killed here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    @override
    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def _answer(self) -> None:
        hub = self.server.hub
        path = urllib.parse.urlsplit(self.path).path
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append(Seen(self.command, path, headers, self.server.is_storage))
        if self.server.is_storage:
            self._send_blob(path.removeprefix("/"))
        elif route := _ROUTE.fullmatch(path):
            self._describe(route["repo"], route["kind"], urllib.parse.unquote(route["revision"] or MAIN))
        elif wanted := _FILE.fullmatch(path):
            revision, file = urllib.parse.unquote(wanted["revision"]), urllib.parse.unquote(wanted["file"])
            self._resolve(wanted["repo"], revision, file)
        else:
            self._refuse(404, "EntryNotFound")

    def _has_token(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.server.hub.token}"

    def _find(self, repo_id: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.server.hub.repositories.get(repo_id)
        if repository is None or (repository.is_private and not self._has_token()):
            self._refuse(401 if not self._has_token() else 404, "RepoNotFound")
            return None
        commit = repository.refs.get(revision, revision)
        if commit not in repository.files:
            self._refuse(404, "RevisionNotFound")
            return None
        return repository, commit

    def _describe(self, repo_id: str, kind: str | None, revision: str) -> None:
        found = self._find(repo_id, revision)
        if found is None:
            return None
        repository, commit = found
        files = repository.files[commit]
        if kind == "tree":
            return self._send_json([_entry(name, body) for name, body in files.items()])
        siblings = [{"rfilename": name} for name in files]
        gated = "manual" if repository.is_gated else False
        return self._send_json({"id": repo_id, "sha": commit, "siblings": siblings, "gated": gated})

    def _resolve(self, repo_id: str, revision: str, file: str) -> None:
        found = self._find(repo_id, revision)
        if found is None:
            return None
        repository, commit = found
        if repository.is_gated and not self._has_token():
            return self._refuse(403 if "Authorization" in self.headers else 401, "GatedRepo")
        body = repository.files[commit].get(file)
        if body is None:
            return self._refuse(404, "EntryNotFound")
        marks = {"X-Repo-Commit": commit}
        if not file.endswith(_LARGE):
            return self._send(200, body, {**marks, "ETag": f'"{_git_digest(body)}"'})
        digest = hashlib.sha256(body).hexdigest()
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(body))}
        return self._send(302, b"", {**marks, **linked, "Location": f"{self.server.hub.storage_url}/{digest}"})

    def _send_blob(self, digest: str) -> None:
        hub = self.server.hub
        body = hub.blob(digest)
        if body is None:
            return self._refuse(404, "EntryNotFound")
        if hub.failures:
            return self._refuse(hub.failures.pop(0), "")
        if hub.damages:
            body = body[:-1] + bytes([body[-1] ^ 1])
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted is None or hub.ignores_ranges:
            return self._send_slowly(200, body, {"ETag": f'"{digest}"'})
        start = int(wanted[1])
        if start >= len(body):
            return self._refuse(416, "")
        content_range = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
        return self._send_slowly(206, body[start:], {"ETag": f'"{digest}"', **content_range})

    def _send_slowly(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        hub = self.server.hub
        self._send_head(status, len(body), headers)
        if self.command == "HEAD":
            return
        end = hub.cut_after.pop(0) if hub.cut_after else len(body)
        step = 1 << 16
        for start in range(0, min(end, len(body)), step):
            while hub.holds_after is not None and start >= hub.holds_after:
                time.sleep(0.01)
            self.wfile.write(body[start : min(start + step, end)])
            hub.on_bytes(start + step)
            time.sleep(step / hub.bytes_per_s)
        if end < len(body):
            self.close_connection = True

    def _send_json(self, document: object) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._send_head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: int, num_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _entry(name: str, body: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(body), "oid": _git_digest(body)}
    if name.endswith(_LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
    return entry


def _git_digest(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
