"""A Hugging Face hub on loopback: the parts of its HTTP API that downloads use, for one model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

NAME = "some-one/Tiny-1.0"


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def commit_of(files: Mapping[str, bytes]) -> str:
    """The commit that holds these files."""
    return digest(b"".join(name.encode() + data for name, data in sorted(files.items())))


@dataclass
class Repository:
    """Contents of a hub's repository, and its faults.

    revisions: files by name, of each branch and tag. members: tokens that have access, where the
    model is gated. sizes: file sizes that it states instead of the true ones. cuts: how often a
    file's connection is closed half way. broken: files that cannot be got. requests: method, path
    and range of each request.
    """

    revisions: dict[str, dict[str, bytes]]
    members: set[str] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)

    def files(self, revision: str) -> dict[str, bytes] | None:
        """Returns the files of a branch, tag or commit."""
        commits = {commit_of(files): files for files in self.revisions.values()}
        return self.revisions.get(revision) or commits.get(revision)

    def got(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        return [
            path.partition("/resolve/")[2].partition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]


class Hub(ThreadingHTTPServer):
    """Serves a repository while it is a context."""

    daemon_threads = True

    def __init__(self, repository: Repository):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repository = repository
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        repository = self.server.repository
        path = urlsplit(self.path).path
        repository.requests.append((self.command, path, self.headers["Range"]))
        api, _, rest = path.partition(f"/api/models/{NAME}/")
        if not api and rest:
            kind, _, revision = rest.partition("/")
            self.describe(kind, revision)
        elif path.startswith(f"/{NAME}/resolve/"):
            revision, _, name = path.removeprefix(f"/{NAME}/resolve/").partition("/")
            self.give(revision, name)
        else:
            self.refuse(401, "RepoNotFound")

    def describe(self, kind: str, revision: str) -> None:
        """The commit of a revision, or the tree of its files."""
        files = self.server.repository.files(revision)
        if files is None:
            self.refuse(404, "RevisionNotFound")
        elif kind == "revision":
            self.tell({"id": NAME, "sha": commit_of(files), "siblings": []})
        else:
            self.tell(
                [
                    {
                        "type": "file",
                        "path": name,
                        "oid": digest(data),
                        "size": self.size(name, data),
                    }
                    for name, data in files.items()
                ]
            )

    def give(self, revision: str, name: str) -> None:
        """A file, or its headers."""
        repository = self.server.repository
        files = repository.files(revision)
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if files is None or name not in files:
            self.refuse(404, "EntryNotFound")
        elif repository.members is not None and token not in repository.members:
            self.refuse(403 if token else 401, "GatedRepo")
        elif name in repository.broken and self.command == "GET":
            self.refuse(500, "")
        else:
            self.send_file(name, files[name], commit_of(files))

    def send_file(self, name: str, data: bytes, commit: str) -> None:
        repository = self.server.repository
        ranged = self.headers["Range"]
        start = int(ranged.removeprefix("bytes=").rstrip("-")) if ranged else 0
        size = self.size(name, data)
        self.send_response(206 if ranged else 200)
        self.send_header("ETag", f'"{digest(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(size - start))
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if repository.cuts.get(name, 0):
            repository.cuts[name] -= 1
            self.wfile.write(data[start : (start + len(data)) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def size(self, name: str, data: bytes) -> int:
        return self.server.repository.sizes.get(name, len(data))

    def tell(self, content: object, status: int = 200, error: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, error: str) -> None:
        self.tell({"error": error}, status, error)
