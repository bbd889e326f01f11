"""Runs as users start them: a text to train on, the command, what it writes; one array saved, and loaded again."""

import json
import shlex
from hashlib import sha256
from pathlib import Path

import torch

from scaling.configs import get
from scaling.mesh import Mesh
from scaling.train import checkpoint
from scaling.train.command import main

ONE, SPECS = Mesh({"X": 1}), {"W": "W[D]"}
TINY = get("tiny").with_(L=1, D=16, F=32, H=8, N=2, K=2)


SMALL = "--batch 2 --seq 16 --warmup 2 --eval-batches 1 --schedule constant --model model.toml"


def write_model(name: str = "model.toml", **changed) -> None:
    sizes = {size: getattr(TINY, size) for size in "LDFNKHV"} | changed
    Path(name).write_text("".join(f"{size} = {json.dumps(value)}\n" for size, value in sizes.items()))


def write_text(lines: int = 20_000) -> str:
    """A text to train on, in the working folder; its path."""
    (path := Path("text.txt").absolute()).write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(lines)))
    return str(path)


def train(line: str) -> int:
    """What the command with these words returns."""
    return main(shlex.split(line))


def refusal(capsys, line: str) -> str:
    """What the command says, in a few lines, as it refuses these words."""
    capsys.readouterr()
    assert train(line) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def records(out: "str | Path", name: str = "metrics.jsonl") -> list[dict]:
    """What a run has said of its steps; a line that a kill has cut short is left out."""
    path, found = Path(out) / name, []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def save(step: int, W: "torch.Tensor | None" = None, **options):
    """In the working folder; by default three elements, which are the step's number."""
    given = torch.full((3,), float(step)) if W is None else W
    return checkpoint.save(".", {"W": given}, SPECS, ONE, step, **options)


def load(folder: str = ".", step: "int | None" = None) -> tuple[list[float], int]:
    state, found = checkpoint.load(folder, SPECS, ONE, step)
    return state["W"].tolist(), found


def tree_of(folder: str) -> dict[str, str]:
    """Return every file and folder there, with a digest of a file's bytes and its time."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = f"{path.stat().st_mtime_ns} {sha256(content).hexdigest()}" if path.is_file() else "a folder"
    return found


def losses(out: str) -> list[float]:
    return [record["loss"] for record in records(out)]
