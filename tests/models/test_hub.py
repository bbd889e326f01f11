"""`--model org/name`, from a small hub on the loopback address that answers as huggingface.co does."""

import json
import multiprocessing
import sys
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

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


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """(a model's folder, what says which paths the hub was asked for, its process)."""
    folder, pickles = tmp_path / "small", tmp_path / "pickles"
    hf.save(folder, CONFIG, tree.map(lambda p: p.float(), shaken(CONFIG)))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    pickles.mkdir()
    (pickles / "config.json").write_bytes((folder / "config.json").read_bytes())
    (pickles / "pytorch_model.bin").write_bytes(b"a pickle")
    given = {"repos": {"org/small": folder, "org/pickles": pickles}, "asked": tmp_path / "asked"}
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), given))
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.server_close()
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN", "HF_HUB_OFFLINE"):
        for given_as in (name, name.lower()):
            monkeypatch.delenv(given_as, raising=False)
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}
    for name, value in (settings | {"HF_HUB_DISABLE_XET": "1"}).items():
        monkeypatch.setenv(name, value)
    for name in of_library():  # which reads its environment when it is imported
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    yield folder, lambda: {path.rpartition("/")[2] for path in given["asked"].read_text().split()}, process
    process.kill()
    process.join()
    for name in of_library():
        del sys.modules[name]


@pytest.mark.slow
def test_a_model_of_the_hub(hub, capfd):
    folder, asked, process = hub
    files = {"config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin"}
    assert show(["params", "--model", "org/small", "--mesh", "Y=2"]) == 0
    assert "org/small on 2 devices" in capfd.readouterr().out
    assert asked() & files == {"config.json"}  # sizes need no weights
    assert plan(["--model", "org/small", "--chip", "v5p", "--chips", "8", "--batch", "64k"]) == 0
    said = []
    for model in (str(folder), "org/small", "org/small"):
        capfd.readouterr()
        given = ["--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--mesh", "Y=2"]
        assert generate(["--model", model, *given]) == 0
        said.append(capfd.readouterr().out)
        if len(said) == 2:
            assert asked() & files == {"config.json", "generation_config.json", "model.safetensors"}  # and no pickle
            process.kill()  # the third time the cache has it
            process.join()
    assert said == [said[0]] * 3
    assert show(["params", "--model", "org/other"]) == 1
    error = " ".join(capfd.readouterr().err.split())
    assert "org/other: is not here, and the hub cannot be reached" in error
    assert error.count("fix: connect to the network") == 1


SAID = {
    "org/none": "has no such model or keeps it private fix: check the name",
    "org/private": "has no such model or keeps it private fix: check the name",
    "org/gated": "to those only who have accepted its license fix: accept it",
    "org/pickles": "has no safetensors on the hub; pickles are not read fix: choose",
}


@pytest.mark.slow
def test_what_the_hub_does_not_give(hub, tmp_path, capsys):
    _, asked, _ = hub
    for name, said in SAID.items():
        for call, words in ((train, ["--data", "small", "--out", "run"]), (generate, ["--prompt-ids", "1"])):
            assert call([*words, "--model", name]) == 1, name
            out, error = capsys.readouterr()
            assert out == ""
            assert said in " ".join(error.split())
            assert error.count("fix:") == 1
    assert not (tmp_path / "run").exists()
    assert not any(path.endswith(".bin") for path in asked())
