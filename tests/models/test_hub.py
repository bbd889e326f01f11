"""`--model org/name`, from a small hub on the loopback address that answers as huggingface.co does."""

import json
import os
import subprocess
import sys
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from probes import shaken

from scaling import tree
from scaling.configs import Config
from scaling.models import hf

pytest.importorskip("huggingface_hub")
CONFIG = Config("small", L=2, D=16, F=24, N=4, K=2, H=4, V=256)
ERRORS = {  # what the hub says of a repository that it does not have, that is private, that is gated
    "org/none": (404, "RepoNotFound"),
    "org/private": (401, "RepoNotFound"),
    "org/gated": (403, "GatedRepo"),
}


COMMANDS = """
import json, os, runpy, sys
import huggingface_hub, torch, scaling.models.hf, scaling.launch

found = []
for words in json.loads(sys.argv[1]):
    paths = ["said-1", "said-2"]
    if not (child := os.fork()):
        for number, path in enumerate(paths, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        code, sys.argv = 0, words
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if code != end.code and end.code is not None:
                print(end.code, file=sys.stderr)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found.append([code, *(open(path).read() for path in paths)])
print(json.dumps(found))
"""  # each as `python -m` of a process of its own, forked from one that has the imports


class Hub(BaseHTTPRequestHandler):
    """/api/models/REPO/revision/main, .../tree/COMMIT and /REPO/resolve/COMMIT/FILE; `asked` are the paths."""

    protocol_version = "HTTP/1.1"
    repos: dict[str, Path]
    asked: list[str]

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in self.repos:
            status, code = ERRORS.get(repo, (404, "RepoNotFound"))
            return self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": "no"})
        folder, commit = self.repos[repo], sha1(repo.encode()).hexdigest()
        files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        if path.startswith("/api/"):
            entries = [
                {"type": "file", "path": n, "rfilename": n, "size": len(b), "oid": sha1(b).hexdigest()}
                for n, b in files.items()
            ]
            table = (
                entries
                if rest[:1] == ["tree"]
                else {"id": repo, "modelId": repo, "sha": commit, "siblings": entries, "private": False}
            )
            return self.answer(200, json.dumps(table).encode(), {"Content-Type": "application/json"})
        body = files[rest[-1]]
        return self.answer(200, body, {"ETag": f'"{sha1(body).hexdigest()}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def answer(self, status, body, headers):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """(what runs commands against the hub, what the hub was asked, its server, the model's folder)."""
    folder, pickles = tmp_path / "small", tmp_path / "pickles"
    hf.save(folder, CONFIG, tree.map(lambda p: p.float(), shaken(CONFIG)))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    pickles.mkdir()
    (pickles / "config.json").write_bytes((folder / "config.json").read_bytes())
    (pickles / "pytorch_model.bin").write_bytes(b"a pickle")
    asked: list[str] = []
    handler = type("Handler", (Hub,), {"repos": {"org/small": folder, "org/pickles": pickles}, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    gone = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN", "HF_HUB_OFFLINE"}
    environment = {name: value for name, value in os.environ.items() if name.upper() not in gone}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache")}
    environment |= {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_XET": "1"}

    def commands(*words: list[str]):
        """(exit code, what it said, and said of errors in one line) of each."""
        done = subprocess.run(
            [sys.executable, "-c", COMMANDS, json.dumps(words)],
            stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path, check=True,
        )  # fmt: skip
        return [(code, out, " ".join(error.split())) for code, out, error in json.loads(done.stdout)]

    yield commands, asked, server, folder
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_a_model_of_the_hub(hub):
    commands, asked, server, folder = hub

    def fetched() -> set[str]:
        return {path.rpartition("/")[2] for path in asked if "/resolve/" in path}

    ((code, out, error),) = commands(["scaling.show", "params", "--model", "org/small", "--mesh", "Y=2"])
    assert code == 0, error
    assert "org/small on 2 devices" in out
    assert fetched() == {"config.json"}  # sizes need no weights
    words = ["--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--mesh", "Y=2"]
    of_hub = ["scaling.generate", "--model", "org/small", *words]
    plan = ["scaling.plan", "--model", "org/small", "--chip", "v5p", "--chips", "8", "--batch", "64k"]
    (code, here, error), there, planned = commands(["scaling.generate", "--model", str(folder), *words], of_hub, plan)
    assert (code, planned[0]) == (0, 0), error
    assert there[:2] == (0, here), there
    assert fetched() == {"config.json", "generation_config.json", "model.safetensors"}  # and no pickle
    server.shutdown()
    server.server_close()
    cached, (code, out, error) = commands(of_hub, ["scaling.show", "params", "--model", "org/other"])
    assert cached[:2] == (0, here), cached
    assert code == 1
    assert "org/other: is not here, and the hub cannot be reached" in error
    assert error.count("fix: connect to the network") == 1


SAID = {
    "org/none": "has no such model or keeps it private fix: check the name",
    "org/private": "has no such model or keeps it private fix: check the name",
    "org/gated": "to those only who have accepted its license fix: accept it",
    "org/pickles": "has no safetensors on the hub; pickles are not read fix: choose",
}


@pytest.mark.slow
def test_what_the_hub_does_not_give(hub, tmp_path):
    commands, asked, *_ = hub
    given = [(name, said) for name, said in SAID.items() for _ in range(2)]
    train = ["scaling.train", "--data", "small", "--out", "run", "--model"]
    generate = ["scaling.generate", "--prompt-ids", "1", "--model"]
    words = [[*command, name] for name in SAID for command in (train, generate)]
    for (name, said), (code, out, error) in zip(given, commands(*words), strict=True):
        assert (code, out) == (1, ""), name
        assert said in error
        assert error.count("fix:") == 1
        assert "Traceback" not in error
    assert not (tmp_path / "run").exists()
    assert not any(path.endswith(".bin") for path in asked)
