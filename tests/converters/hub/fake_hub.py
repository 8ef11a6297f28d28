"""A Hugging Face hub in one thread: the requests of the hub's client, over HTTP, in memory.

Answers have the fields that the client reads, and the codes and headers that the hub sends.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
LARGE = (".safetensors", ".mlxfn")  # what a repository keeps apart, as the hub's .gitattributes say


@dataclass
class Repository:
    """Branches of commits of files."""

    private: bool = False
    gated: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: Files, message: str = "") -> str:
        state = repr([len(self.commits), sorted(files)]).encode()
        sha = hashlib.sha1(state).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    @property
    def files(self) -> Files:
        return self.commits[self.branches["main"]]

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass(frozen=True)
class Refusal:
    """An answer that is no success; `headers` tell the client which."""

    status: int
    message: str = ""
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()


NOT_FOUND = Refusal(404, "Repository not found", "RepoNotFound")


class FakeHub:
    """Repositories, tokens, and what shall go wrong.

    Attributes:
        tokens: token -> role ("read", "write").
        large: sha256 -> content that was sent apart from commits.
        refuse: pattern of "METHOD path" -> the answer instead.
        cut: pattern of a path -> how many bytes are sent before the connection ends.
        log: "METHOD path" of every request, with its Range.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens = {"hf_write": "write", "hf_read": "read"}
        self.large: Files = {}
        self.refuse: dict[str, Refusal] = {}
        self.cut: dict[str, int] = {}
        self.log: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, files: Files, **options: Any) -> Repository:
        repository = self.repositories[name] = Repository(**options)
        repository.commit("main", files)
        return repository

    def asked(self, pattern: str) -> list[str]:
        return [line for line in self.log if re.search(pattern, line)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _make_handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        def __init__(self, *arguments: Any) -> None:
            self.hub = hub
            super().__init__(*arguments)

    return Handler


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 (names of the base class)

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        line = f"{self.command} {path}"
        span = self.headers.get("Range")
        self.hub.log.append(line + (f" {span}" if span else ""))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, refusal in self.hub.refuse.items():
            if re.search(pattern, line):
                return self._refuse(refusal)
        for method, pattern, act in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return act(self, **match.groupdict())
        return self._refuse(Refusal(500, f"the fake hub has no {line}"))

    # --- answers ---------------------------------------------------------------------------------

    def _send(self, status: int, body: bytes, headers: dict[str, str], most: int | None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if most is None else body[:most])
        if most is not None:
            self.close_connection = True

    def _json(self, data: object, status: int = 200) -> None:
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json"}, None)

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Message": refusal.message, "X-Error-Code": refusal.code}
        headers = {name: value for name, value in headers.items() if value}
        body = json.dumps({"error": refusal.message}).encode()
        self._send(refusal.status, body, {**headers, **dict(refusal.headers)}, None)

    def _role(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return self.hub.tokens.get(token)

    def _repository(self, name: str) -> Repository | None:
        """The repository, unless it must not be seen; then the refusal is sent."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and self._role() is None):
            self._refuse(NOT_FOUND)
            return None
        return found

    def _commit_of(self, repository: Repository, revision: str) -> str | None:
        sha = repository.find(revision)
        if sha is None:
            self._refuse(Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound"))
        return sha

    def _may_write(self) -> bool:
        if self._role() == "write":
            return True
        self._refuse(Refusal(403, "You don't have the rights to write to this namespace"))
        return False

    # --- requests --------------------------------------------------------------------------------

    def whoami(self) -> None:
        role = self._role()
        if role is None:
            return self._refuse(Refusal(401, "Invalid credentials in Authorization header"))
        token = {"displayName": "laptop", "role": role}
        return self._json({"name": "ada", "auth": {"type": "access_token", "accessToken": token}})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        if not self._may_write():
            return None
        if name in self.hub.repositories:
            return self._refuse(Refusal(409, "You already created this model repo"))
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.add(name, {".gitattributes": b""}, private=private)
        return self._json({"url": f"{self.hub.url}/{name}"})

    def info(self, repo: str, revision: str = "main") -> None:
        repository = self._repository(repo)
        sha = repository and self._commit_of(repository, revision)
        if not repository or not sha:
            return
        siblings = [{"rfilename": name} for name in repository.commits[sha]]
        facts = {"id": repo, "sha": sha, "private": repository.private, "siblings": siblings}
        self._json({**facts, "tags": [], "cardData": repository.card or None})

    def tree(self, repo: str, revision: str) -> None:
        repository = self._repository(repo)
        sha = repository and self._commit_of(repository, revision)
        if not repository or not sha:
            return
        entries = []
        for name, content in repository.commits[sha].items():
            entry = {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}
            if name.endswith(LARGE):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
            entries.append(entry)
        self._json(entries)

    def resolve(self, repo: str, revision: str, name: str) -> None:
        repository = self._repository(repo)
        if repository is None:
            return None
        if repository.gated and self._role() != "write":
            message = f"Access to model {repo} is restricted. You must have access to it"
            return self._refuse(Refusal(403, message, "GatedRepo"))
        sha = self._commit_of(repository, revision)
        if sha is None:
            return None
        content = repository.commits[sha].get(name)
        if content is None:
            return self._refuse(Refusal(404, "Entry not found", "EntryNotFound"))
        digest = hashlib.sha256(content).hexdigest() if name.endswith(LARGE) else _blob(content)
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        status, most = 200, None
        if span := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            first = int(span[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[first:]
        if self.command == "GET":
            for pattern, left in self.hub.cut.items():
                if re.search(pattern, name):
                    most, self.hub.cut[pattern] = left, 0
        return self._send(status, content, headers, most)

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        if "license: no-such-license" in content:
            errors = {"errors": [{"message": '"license" must be one of [apache-2.0, ...]'}]}
            return self._json(errors, 400)
        return self._json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        repository = self._repository(repo)
        sha = repository and self._commit_of(repository, revision)
        if not repository or not sha or not self._may_write():
            return
        there = repository.commits[sha]
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": _blob(there[file["path"]]) if file["path"] in there else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": files})

    def batch(self, repo: str) -> None:
        objects = []
        for one in json.loads(self.body)["objects"]:
            if one["oid"] not in self.hub.large:
                href = f"{self.hub.url}/lfs/{one['oid']}"
                one["actions"] = {"upload": {"href": href}}
            objects.append(one)
        self._json({"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.large[oid] = self.body
        self._json({})

    def branch(self, repo: str, name: str) -> None:
        repository = self._repository(repo)
        if repository and self._may_write():
            repository.branches[name] = repository.branches["main"]
            self._json({})

    def commit(self, repo: str, branch: str) -> None:
        repository = self._repository(repo)
        if repository is None or not self._may_write():
            return None
        parent = repository.branches[branch]
        files, message = dict(repository.commits[parent]), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit", parent) != parent:
                    return self._refuse(Refusal(412, "A commit has happened since"))
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise AssertionError(item["key"])
        sha = repository.commit(branch, files, message)
        return self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})


def _blob(content: bytes) -> str:
    """The name that git gives a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("GET", rf"/api/models/{_REPO}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>.+)", _Handler.tree),
    ("GET HEAD", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>.+)", _Handler.preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/(?P<oid>\w+)", _Handler.store),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<name>.+)", _Handler.branch),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<branch>.+)", _Handler.commit),
]
