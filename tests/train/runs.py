"""Runs as users start them: a text to train on, the command, and what it writes."""

import json
import sys
from pathlib import Path


def write_text(folder: Path, lines: int = 20_000) -> str:
    """A text file; its path."""
    (folder / "text.txt").write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(lines)))
    return str(folder / "text.txt")


def options(folder: Path, name: str, *more: str) -> list[str]:
    """Of a run of this name on the folder's text."""
    return ["--data", str(folder / "text.txt"), "--out", str(folder / name), *more]


def command(folder: Path, name: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "scaling.train", *options(folder, name, *more)]


def records(out: Path, name: str = "metrics.jsonl") -> list[dict]:
    """What a run has said of its steps; a line that a kill has cut short is left out."""
    path, found = Path(out) / name, []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
