"""`--model org/name`, from a small hub on the loopback address that answers as huggingface.co does."""

import json
import multiprocessing
import sys
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from probes import shaken
from refused import named

from scaling import tree
from scaling.configs import Config
from scaling.models import hf
from scaling.plan.__main__ import main as plan
from scaling.serve.generate_command import main as generate
from scaling.show.params import main as show
from scaling.train.command import main as train

pytest.importorskip("huggingface_hub")
CONFIG = Config("small", L=2, D=16, F=24, N=4, K=2, H=4, V=256)
PRIVATE = "has no such model or keeps it private fix: check the name"
# of a repository that the hub does not have, that is private, that is gated: its answer, and what is said
ERRORS = named(
    """
repository   status, code, words
org/none     (404, "RepoNotFound", PRIVATE)
org/private  (401, "RepoNotFound", PRIVATE)
org/gated    (403, "GatedRepo", "to those only who have accepted its license fix: accept it")
org/pickles  (200, "", "has no safetensors on the hub; pickles are not read fix: choose")
""",
    globals(),
)


def answers(repo: str, folder: Path) -> dict[str, tuple[bytes, dict]]:
    """What the hub has of a folder by path: /api/models/REPO/revision/main, .../tree/COMMIT and /REPO/resolve/..."""
    commit, files = sha1(repo.encode()).hexdigest(), {file.name: file.read_bytes() for file in folder.iterdir()}
    tags = {name: sha1(data).hexdigest() for name, data in files.items()}
    entries = [{"type": "file", "path": n, "rfilename": n, "size": len(files[n]), "oid": tags[n]} for n in files]
    table = {"id": repo, "modelId": repo, "sha": commit, "siblings": entries, "private": False}
    said = {"revision/main": table, f"tree/{commit}": entries}
    kind = {"Content-Type": "application/json"}
    found = {f"/api/models/{repo}/{path}": (json.dumps(each).encode(), kind) for path, each in said.items()}
    for name, data in files.items():
        for at in ("main", commit):
            found[f"/{repo}/resolve/{at}/{name}"] = data, {"ETag": f'"{tags[name]}"', "X-Repo-Commit": commit}
    return found


class Hub(BaseHTTPRequestHandler):
    """`table` has what is answered of a path; `asked` gets a line a path."""

    table: dict[str, tuple[bytes, dict]]
    asked: Path

    def do_GET(self):
        path = self.path.partition("?")[0]
        with self.asked.open("a") as lines:
            lines.write(f"{path}\n")
        repo = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        status, code, _ = ERRORS.get(repo, (200, "", ""))
        body, headers = (b"", {"X-Error-Code": code, "X-Error-Message": "no"}) if code else self.table[path]
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


def of_library() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Its process, a model's folder, and where the paths that it was asked for stand."""
    folder, pickles, asked = (tmp_path / name for name in ("small", "pickles", "asked"))
    hf.save(folder, CONFIG, tree.map(lambda p: p.float(), shaken(CONFIG)))
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    pickles.mkdir()
    (pickles / "config.json").write_bytes((folder / "config.json").read_bytes())
    for each in (folder, pickles):
        (each / "pytorch_model.bin").write_bytes(b"a pickle")
    table = answers("org/small", folder) | answers("org/pickles", pickles)
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"table": table, "asked": asked}))
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
    yield process, folder, asked
    process.kill()
    process.join()
    for name in of_library():
        del sys.modules[name]


@pytest.mark.slow
def test_a_model_of_the_hub(hub, capfd):
    """What it gives, and says that it does not give; without it, what is in the cache."""
    process, folder, asked = hub

    def files():
        names = {Path(path).name for path in asked.read_text().split()}
        return names & {"config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin"}

    assert show(["--model", "org/small", "--mesh", "Y=2"]) == 0
    assert "org/small on 2 devices" in capfd.readouterr().out
    assert files() == {"config.json"}  # sizes need no weights
    assert plan(["--model", "org/small", "--chip", "v5p", "--chips", "8", "--batch", "64k"]) == 0
    capfd.readouterr()

    def said(call, *words, code=1):
        assert call([*words]) == code
        out, error = capfd.readouterr()
        assert bool(out) == (not code)
        assert error.count("fix:") == code
        return out or " ".join(error.split())

    for name, (*_, reason) in ERRORS.items():
        assert reason in said(train, "--data", "small", "--out", "run", "--model", name)
        assert reason in said(generate, "--prompt-ids", "1", "--model", name)
    assert not Path("run").exists()

    given = ["--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--mesh", "Y=2", "--model"]
    wanted = said(generate, *given, str(folder), code=0)
    assert said(generate, *given, "org/small", code=0) == wanted
    assert files() == {"config.json", "generation_config.json", "model.safetensors"}  # and no pickle
    process.kill()
    process.join()
    assert said(generate, *given, "org/small", code=0) == wanted  # the cache has it
    error = said(show, "--model", "org/other")
    assert "org/other: is not here, and the hub cannot be reached" in error
    assert "fix: connect to the network" in error
