"""A model is fetched by its id from a hub, here a local one that answers as the real one; a run records its commit."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RunFolderError
from agentgym.model.model_name import is_model_id, model_folder

COMMIT = "5" * 40
PREFIX = f"/org/tiny/resolve/{COMMIT}/"


class Hub(BaseHTTPRequestHandler):
    """The answers of the hub for `org/tiny`, which is the embedded model, and errors for others."""

    requests: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.requests.append(f"{self.command} {path}")
        if path in ("/api/models/org/tiny/revision/main", "/api/models/org/tiny"):
            self._send(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            files = [file for file in embedded_folder().iterdir() if file.is_file()]
            files += [Path(__file__)]  # not a file of a model: it is left out
            listed = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _digest(f)} for f in files]
            self._send(json.dumps(listed).encode())
        elif path.startswith(PREFIX) and (embedded_folder() / path.removeprefix(PREFIX)).is_file():
            file = embedded_folder() / path.removeprefix(PREFIX)
            self._send(file.read_bytes(), ETag=f'"{_digest(file)}"', **{"X-Repo-Commit": COMMIT})
        elif "gated" in path:
            self._send(b"{}", 403, **{"X-Error-Code": "GatedRepo", "X-Error-Message": "ask first"})
        elif path.startswith("/api/models/org/tiny/revision/"):
            self._send(b"{}", 404, **{"X-Error-Code": "RevisionNotFound"})
        else:
            self._send(b"{}", 404, **{"X-Error-Code": "RepoNotFound"})

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Starts a hub and returns the requests that it gets."""
    seen: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("SeenHub", (Hub,), {"requests": seen}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    _use_hub(f"http://127.0.0.1:{server.server_port}", tmp_path / "cache", monkeypatch)
    yield seen
    server.shutdown()
    server.server_close()
    thread.join()


def _use_hub(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_a_model_is_fetched_once_and_its_folder_names_the_commit(requests: list[str]) -> None:
    folder = model_folder("org/tiny")
    assert folder.name == COMMIT
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (embedded_folder() / name).read_bytes()
    assert not (folder / Path(__file__).name).exists()
    fetched = [request for request in requests if request.startswith("GET /org/tiny")]
    assert len(fetched) == len(set(fetched)) > 0
    requests.clear()
    assert model_folder(f"org/tiny@{COMMIT}") == folder
    assert not [request for request in requests if request.startswith("GET /org/tiny")]


@pytest.mark.long
def test_a_run_names_the_commit_of_its_model_and_resumes_with_it(requests: list[str], tmp_path: Path) -> None:
    small = ["--tasks", "1", "--group-size", "2", "--eval.episodes", "0", "--limits.turn-tokens", "8"]
    train = ["train", "--env", "TextGame-v0", "--model", "org/tiny", *small, "--output", str(tmp_path / "run")]
    assert main([*train, "--steps", "1"]) == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"] == f"org/tiny@{COMMIT}"
    assert main([*train, "--steps", "2", "--resume"]) == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/gated", r"'org/gated' is a gated model: .*hf auth login"),
        ("org/none", r"no folder 'org/none' and no public model of that name"),
        ("org/tiny@old", r"'org/tiny' has no revision 'old'"),
    ],
)
def test_a_model_that_cannot_be_had_is_refused_in_one_line(requests: list[str], name: str, message: str) -> None:
    with pytest.raises(RunFolderError, match=message) as refused:
        model_folder(name)
    assert "\n" not in str(refused.value)
    assert requests


def test_without_a_network_the_command_that_fetches_the_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _use_hub("http://127.0.0.1:9", tmp_path, monkeypatch)
    assert main(["train", "--env", "TextGame-v0", "--model", "org/tiny@v2", "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "`hf download org/tiny --revision v2` fetches it" in " ".join(error.split())
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_an_existing_folder_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_model_id("models/mine")
    assert is_model_id("models/other")
    assert model_folder("models/mine") == Path("models/mine")


def test_a_model_at_an_address_is_fetched_again_only_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote = tmp_path / "model"
    shutil.copytree(model_folder("embedded"), remote)
    (remote / "learner").mkdir()
    (remote / "learner/config.json").write_text("{}")
    (remote / "weights.bin").touch()
    first = model_folder(f"file://{remote}")
    files = [path for path in model_folder("embedded").iterdir() if path.suffix in (".json", ".safetensors")]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in files
    }
    (first / "mark").touch()  # of this copy
    assert (model_folder(f"file://{remote}") / "mark").exists()
    (remote / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    changed = model_folder(f"file://{remote}")
    assert changed != first and json.loads((changed / "generation_config.json").read_text()) == {"eos_token_id": 7}


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("file:///nowhere/model", "there is no model in 'file:///nowhere/model'"),
        ("nothing://model", "'nothing://model' cannot be opened: Protocol not known: nothing"),
    ],
)
def test_an_address_without_a_model_is_one_line(address: str, message: str) -> None:
    with pytest.raises((ConfigError, RunFolderError), match=message):
        model_folder(address)


@pytest.mark.parametrize("name_beside", ["config.json", "adapter_config.json"])
def test_an_adapter_is_refused_beside_a_model_too(name_beside: str, tmp_path: Path) -> None:
    for name in ("adapter_config.json", name_beside):
        (tmp_path / name).write_text("{}")
    with pytest.raises(RunFolderError, match="has an adapter that is not merged into a model"):
        model_folder(str(tmp_path))
