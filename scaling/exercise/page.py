"""An exercise is a page of Markdown, pages/NAME.md: its data, its question, one device's program, and blanks to fill.

+++
kind = "write"                       one of judge.py, with the fields of that kind
title = "FSDP's backward"
+++
The question, for a reader who has read that section of the book.

```python dense                      the function of whole arrays on one device (of kind "write")
```python slips                      functions with known slips, fn(*arrays, rank), whose docstrings are the hints;
                                     not shown
```python blanks                     the file that is handed out; each `...` is to be filled in

`grade` judges an answer in a separate process, which is ended after a minute with everything that it started.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

PAGES = Path(__file__).parent / "pages"
SECONDS = 60


@dataclass(frozen=True)
class Exercise:
    """One exercise: `text` is its question in Markdown, `data` the fields of its kind."""

    name: str
    title: str
    kind: str
    text: str
    dense: str
    slips: str
    blanks: str
    data: Mapping[str, Any]

    @property
    def part(self) -> int:
        """The book's part."""
        return int(self.name.partition("_")[0])


def read(file: Path) -> Exercise:
    """Read an exercise from its page."""
    _, head, body = file.read_text(encoding="utf-8").split("+++\n", 2)
    data = tomllib.loads(head)
    blocks = dict(re.findall(r"^```python (\w+)\n(.*?)^```\n", body, re.MULTILINE | re.DOTALL))
    text = re.sub(r"^```python (?:blanks|slips)\n.*?^```\n", "", body, flags=re.MULTILINE | re.DOTALL)
    title, kind = data.pop("title"), data.pop("kind")
    data = MappingProxyType(data)
    dense, slips = blocks.get("dense", ""), blocks.get("slips", "")
    return Exercise(file.stem, title, kind, text.strip(), dense, slips, blocks["blanks"], data)


@cache
def exercises() -> Mapping[str, Exercise]:
    """Return all exercises by name, in the book's order."""
    return MappingProxyType({file.stem: read(file) for file in sorted(PAGES.glob("*.md"))})


def exercise_named(name: str) -> Exercise:
    """Return the exercise of this name. Raise a ValueError if no exercise has it."""
    if name not in exercises():
        raise ValueError(f"there is no exercise {name!r}\n  fix: choose one that `python -m scaling.exercise` lists")
    return exercises()[name]


def new(name: str) -> str:
    """Return the file that is handed out: the question, and blanks to fill in."""
    exercise = exercise_named(name)
    question = re.sub(r"^```.*\n?", "", exercise.text, flags=re.MULTILINE).strip()
    how = f"Check it: python -m scaling.exercise check {name}.py"
    if exercise.kind == "write":
        sizes = ", ".join(f"{dim}={size}" for dim, size in exercise.data["sizes"].items())
        how += f"\nIt starts the devices of the mesh {exercise.data['mesh']} itself, and takes {sizes}."
    return f'"""Exercise {name}: {exercise.title}\n\n{question}\n\n{how}\n"""\n\n{exercise.blanks}'


def name_in(text: str) -> str:
    """Return the exercise that a file's first lines name. Raise a ValueError if they name none."""
    if not (known := re.search(r"^\s*(?:[rf]?\"\"\"|#)\s*Exercise (\w+)", text, re.MULTILINE)):
        raise ValueError(
            "the file does not say which exercise it answers\n  fix: keep its first line, Exercise NAME: ..."
        )
    return exercise_named(known[1]).name


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and the judge's message."""

    right: bool
    message: str

    def __str__(self) -> str:
        return ("right: " if self.right else "not yet: ") + self.message


def grade(answer: "str | Path", seconds: float = SECONDS) -> Verdict:
    """Return the judge's verdict on an answer, a file or its text. Raise a ValueError if it names no exercise."""
    if "\n" in str(answer):
        text = str(answer)
    elif Path(answer).is_file():
        text = Path(answer).read_text(encoding="utf-8")
    else:
        raise ValueError(f"there is no file {answer}\n  fix: write one by `new`, and fill it in")
    name = name_in(text)
    with tempfile.TemporaryDirectory() as folder:
        file, result = Path(folder) / f"{name}.py", Path(folder) / "verdict.json"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "scaling.exercise.judge", name, str(file), str(result)]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, complaint = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Verdict(
                False, f"it did not end within {seconds:.0f} s\n  fix: look for a loop or a wait that has no end"
            )
        finally:
            _end(process)
        if not result.exists():
            last = (complaint.strip().splitlines() or ["it said nothing"])[-1]
            return Verdict(False, f"its process ended with {process.returncode} before it was judged: {last}")
        return Verdict(**json.loads(result.read_text()))


def _end(process: subprocess.Popen) -> None:
    """End a process and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
