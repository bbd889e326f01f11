"""`--model org/name`, from a small hub on the loopback address that answers as huggingface.co does."""

import json
import multiprocessing
import sys
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from probes import shaken

from scaling import tree
from scaling.configs import Config
from scaling.generate.command import main as generate
from scaling.models import hf
from scaling.plan.__main__ import main as plan
from scaling.show import main as show
from scaling.train.command import main as train

pytest.importorskip("huggingface_hub")
CONFIG = Config("small", L=2, D=16, F=24, N=4, K=2, H=4, V=256)
ERRORS = {  # what the hub says of a repository that it does not have, that is private, that is gated
    "org/none": (404, "RepoNotFound"),
    "org/private": (401, "RepoNotFound"),
    "org/gated": (403, "GatedRepo"),
}


class Hub(BaseHTTPRequestHandler):
    """/api/models/REPO/revision/main, .../tree/COMMIT and /REPO/resolve/COMMIT/FILE; `asked` has a line a path."""

    protocol_version = "HTTP/1.1"
    repos: dict[str, Path]
    asked: Path

    def do_GET(self):
        path = self.path.partition("?")[0]
        with self.asked.open("a") as lines:
            lines.write(f"{path}\n")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.repos:
            status, code = ERRORS[repo]
            return self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": "no"})
        folder, commit = self.repos[repo], sha1(repo.encode()).hexdigest()
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        if not path.startswith("/api/"):
            body = files[rest[-1]]
            return self.answer(200, body, {"ETag": f'"{sha1(body).hexdigest()}"', "X-Repo-Commit": commit})
        entries = [
            {"type": "file", "path": n, "rfilename": n, "size": len(b), "oid": sha1(b).hexdigest()}
            for n, b in files.items()
        ]
        table = {"id": repo, "modelId": repo, "sha": commit, "siblings": entries, "private": False}
        said = json.dumps(entries if rest[:1] == ["tree"] else table).encode()
        return self.answer(200, said, {"Content-Type": "application/json"})

    do_HEAD = do_GET

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body)), "Connection": "close"}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def of_library() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]


class Asked(NamedTuple):
    """A hub that answers: its process, a model's folder, and where the paths that it was asked for stand."""

    process: multiprocessing.Process
    folder: Path
    paths: Path

    def files(self) -> set[str]:
        return {Path(path).name for path in self.paths.read_text().split()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder, pickles, asked = (tmp_path / name for name in ("small", "pickles", "asked"))
    hf.save(folder, CONFIG, tree.map(lambda p: p.float(), shaken(CONFIG)))
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    pickles.mkdir()
    (pickles / "config.json").write_bytes((folder / "config.json").read_bytes())
    for each in (folder, pickles):
        (each / "pytorch_model.bin").write_bytes(b"a pickle")
    given = {"repos": {"org/small": folder, "org/pickles": pickles}, "asked": asked}
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), given))
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.server_close()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN", "HF_HUB_OFFLINE"):
        for given_as in (name, name.lower()):
            monkeypatch.delenv(given_as, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in of_library():  # which reads its environment when it is imported
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    yield Asked(process, folder, asked)
    process.kill()
    process.join()
    for name in of_library():
        del sys.modules[name]


SAID = {
    "org/none": "has no such model or keeps it private fix: check the name",
    "org/private": "has no such model or keeps it private fix: check the name",
    "org/gated": "to those only who have accepted its license fix: accept it",
    "org/pickles": "has no safetensors on the hub; pickles are not read fix: choose",
}


@pytest.mark.slow
def test_a_model_of_the_hub(hub, capfd):
    """What it gives, and says that it does not give; without it, what is in the cache."""
    files = {"config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin"}
    assert show(["params", "--model", "org/small", "--mesh", "Y=2"]) == 0
    assert "org/small on 2 devices" in capfd.readouterr().out
    assert hub.files() & files == {"config.json"}  # sizes need no weights
    assert plan(["--model", "org/small", "--chip", "v5p", "--chips", "8", "--batch", "64k"]) == 0
    capfd.readouterr()

    def said(call, *words, code=1):
        assert call([*words]) == code
        out, error = capfd.readouterr()
        assert bool(out) == (not code)
        assert error.count("fix:") == code
        return out or " ".join(error.split())

    for name, reason in SAID.items():
        assert reason in said(train, "--data", "small", "--out", "run", "--model", name)
        assert reason in said(generate, "--prompt-ids", "1", "--model", name)
    assert not Path("run").exists()

    given = ["--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--mesh", "Y=2", "--model"]
    wanted = said(generate, *given, str(hub.folder), code=0)
    assert said(generate, *given, "org/small", code=0) == wanted
    assert hub.files() & files == {"config.json", "generation_config.json", "model.safetensors"}  # and no pickle
    hub.process.kill()
    hub.process.join()
    assert said(generate, *given, "org/small", code=0) == wanted  # the cache has it
    error = said(show, "params", "--model", "org/other")
    assert "org/other: is not here, and the hub cannot be reached" in error
    assert "fix: connect to the network" in error
