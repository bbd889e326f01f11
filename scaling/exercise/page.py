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
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

PAGES = Path(__file__).parent / "pages"


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
