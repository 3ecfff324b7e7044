"""A stand-in for the Hugging Face hub on the loopback address: as much of its API as an upload and a download of small files need."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import huggingface_hub
import pytest

COMMIT = "0" * 40


class Hub:
    """What was uploaded, by repository and path, and every request that came."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Let huggingface_hub talk to a new stand-in."""
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def answer(self, value: object = None, status: int = 200, content: bytes | None = None, **headers: str) -> None:
            content = json.dumps(value).encode() if content is None else content
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_POST(self) -> None:  # what was asked is kept, then answered
            found.requests.append(f"POST {self.path}")
            body = self.body()
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = "/".join(part for part in (asked.get("organization") or "me", asked["name"]) if part)
                found.files.setdefault(name, {})
                self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                self.answer({"files": files})
            elif "/commit/" in self.path:
                name = self.path.removeprefix("/api/models/").split("/commit/")[0]
                if name not in found.files:
                    self.answer({"error": "no such repository"}, 404, X_Error_Code="RepoNotFound")
                    return
                for line in body.decode().splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        found.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                self.answer({"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
            else:
                self.answer({"error": "unknown"}, 404)

        def do_GET(self) -> None:
            found.requests.append(f"{self.command} {self.path}")
            name, _, rest = self.path.lstrip("/").partition("/resolve/")
            path = rest.partition("/")[2]
            if path in found.files.get(name, {}):
                content = found.files[name][path]
                self.answer(content=content, ETag=f'"{len(content)}"', X_Repo_Commit=COMMIT)
            else:
                self.answer({"error": "not there"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address)  # made when the module was imported
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    if int(huggingface_hub.__version__.split(".")[0]) < 2:  # it asks a fixed address whether a card is valid
        monkeypatch.setattr(huggingface_hub.RepoCard, "validate", lambda card, repo_type=None: None)
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
