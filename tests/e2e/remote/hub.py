"""A server on loopback that answers as the Hugging Face Hub does: one model repository, and one bucket to read."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY, BUCKET = "someone/model", "someone/runs"


@dataclass
class Hub:
    """``files`` of the repository and of the bucket, by path; ``commits``: the paths that each one changed.

    ``refused``: the status that every commit is answered with; ``requests``: (path, Range) of every file that was read.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    bucket: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)
    refused: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)


def _entries(files: dict[str, bytes], below: str) -> list[dict[str, object]]:
    prefix = f"{below}/" if below else ""
    folders, entries = set(), []
    for path, data in files.items():
        if not path.startswith(prefix):
            continue
        first, _, rest = path[len(prefix) :].partition("/")
        if rest:
            folders.add(prefix + first)
        else:
            entries.append(_entry(path, data))
    return entries + [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)]


def _entry(path: str, data: bytes) -> dict[str, object]:
    digest = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": path, "size": len(data), "oid": digest, "xetHash": digest}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            return None

        def _answer(self, status: int, data: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _json(self, document: object) -> None:
            self._answer(200, json.dumps(document).encode(), Content_Type="application/json")

        def _missing(self, code: str) -> None:
            self._answer(404, b"{}", X_Error_Code=code)

        def _file(self, files: dict[str, bytes], path: str) -> None:
            asked = self.headers.get("Range", "")
            hub.requests.append((path, asked))
            data = files.get(path)
            if data is None:
                self._missing("EntryNotFound")
            elif not asked:
                self._answer(200, data)
            else:
                begin, end = map(int, asked.removeprefix("bytes=").split("-"))
                part = data[begin : end + 1]
                self._answer(206, part, Content_Range=f"bytes {begin}-{begin + len(part) - 1}/{len(data)}")

        def _tree(self, files: dict[str, bytes], below: str) -> None:
            entries = _entries(files, below)
            if not entries and below and files is hub.files:
                self._missing("EntryNotFound")
            else:
                self._json(entries)

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            api, files = f"/api/models/{REPOSITORY}", f"/{REPOSITORY}/resolve/main/"
            if path in (api, f"{api}/revision/main"):
                self._json({"id": REPOSITORY, "sha": "0" * 40})
            elif path.startswith(f"{api}/tree/main"):
                self._tree(hub.files, path.removeprefix(f"{api}/tree/main").strip("/"))
            elif path.startswith(files):
                self._file(hub.files, path.removeprefix(files))
            elif path == f"/api/buckets/{BUCKET}":
                created = "2026-01-01T00:00:00.000Z"
                self._json({"id": BUCKET, "private": False, "createdAt": created, "size": 0, "totalFiles": 0})
            elif path.startswith(f"/api/buckets/{BUCKET}/tree"):
                self._tree(hub.bucket, path.removeprefix(f"/api/buckets/{BUCKET}/tree").strip("/"))
            elif path.startswith(f"/buckets/{BUCKET}/resolve/"):
                self._file(hub.bucket, path.removeprefix(f"/buckets/{BUCKET}/resolve/"))
            else:
                self._missing("RepoNotFound")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            action = path.removeprefix(f"/api/models/{REPOSITORY}/").removesuffix("/main")
            if action == "paths-info":
                paths = parse_qs(body.decode())["paths"]
                self._json([_entry(path, hub.files[path]) for path in paths if path in hub.files])
            elif action == "preupload":
                paths = [file["path"] for file in json.loads(body)["files"]]
                self._json({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
            elif action == "commit" and hub.refused:
                self._answer(hub.refused, b"{}")
            elif action == "commit":
                self._commit([json.loads(line) for line in body.splitlines()])
            else:
                self._missing("RepoNotFound")

        def _commit(self, lines: list[dict[str, dict[str, str]]]) -> None:
            changed = []
            for line in lines:
                path = line["value"].get("path", "")
                if line["key"] == "file":  # type: ignore[comparison-overlap]
                    hub.files[path] = base64.b64decode(line["value"]["content"])
                    changed.append(path)
                elif line["key"] == "deletedFile":  # type: ignore[comparison-overlap]
                    del hub.files[path]
                    changed.append(f"-{path}")
            hub.commits.append(sorted(changed))
            self._json({"commitUrl": f"{hub.url}/{REPOSITORY}/commit/{'1' * 40}", "commitOid": "1" * 40})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
