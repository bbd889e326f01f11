"""Chapters run in this process, as scripts with a small size on a terminal of 80 columns, cell by cell if need be; and
what comes of what they propose to try."""

import ast
import functools
import re
import tomllib
from math import exp, expm1
from pathlib import Path

import pytest

from scaling.book.notebook import ScriptRun, run_script

HERE = Path(__file__).parent
CHAPTERS = HERE.parents[1] / "chapters"
ALL = sorted(path.stem for path in CHAPTERS.glob("*.py"))
ON_A_PAGE = [name for name in ALL if name != "11_recap"]  # the recap runs the others

TRAIN = {  # those that train, and how the tests run them; the site has all on their own meshes
    **dict.fromkeys(("05_dp", "05_fsdp"), "--steps 2 --mesh X=2"),
    "05_tp": "--steps 2 --mesh Y=2",
    "05_pods": "--steps 2 --mesh P=2,X=2",
    "05_pp": "--steps 2",
    "05_fsdp_tp": "--steps 2 --mesh X=2,Y=2",
    "06_train_llama": "--steps 3 --mesh X=2,C=2",
    "12_eight_bits": "--steps 2",
}


def source(name: str) -> str:
    return (CHAPTERS / f"{name}.py").read_text(encoding="utf-8")


def run(name: str, *options: str, code: str | None = None) -> ScriptRun:
    """The chapter, or an edited text of it, with these options and `--small`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return run_script(CHAPTERS / f"{name}.py", [*TRAIN.get(name, "").split(), *options], code)


@functools.cache
def chapter(name: str) -> ScriptRun:
    """The chapter as run once for all tests."""
    return run(name)


@functools.cache
def functions(name: str) -> dict:
    """The chapter's functions, by name, without a run of its cells: they use what it imports and each other."""
    kinds, names = (ast.Import, ast.ImportFrom, ast.FunctionDef), {}
    body = [node for node in ast.parse(source(name)).body if isinstance(node, kinds)]
    exec(compile(ast.Module(body, []), name, "exec"), names)
    return names


def cells(name: str) -> list[tuple[str, str, str]]:
    """The chapter's cells in order: ("markdown" or "code", what stands beside its mark, text)."""
    before, *found = re.split(r"^# %%(.*)\n", source(name), flags=re.M)
    assert before == "", f"{name} begins with something that is in no cell"
    kinds = ["markdown" if "[markdown]" in mark else "code" for mark in found[::2]]
    return list(zip(kinds, found[::2], found[1::2], strict=True))


def things_to_try(name: str) -> dict[str, str]:
    """The last cell's three: {"old": ..., "new": ..., "expression": ..., "flag": ...}."""
    cell = re.sub(r"\n# ?", "\n", source(name).split("# %% [markdown]")[-1])
    found = re.fullmatch(
        r" ## Three things to try 1\. Edit: replace `(?P<old>.+?)` by `(?P<new>.+?)`.*"
        r" 2\. Question: .*?Evaluate `(?P<expression>.+?)`.* 3\. Flag: run with `(?P<flag>.+?)`.*",
        re.sub(r"\s+", " ", cell),
    )
    assert found, f"{name} does not end with three things to try"
    return found.groupdict()


def tried_in(name: str) -> str:
    """The text that the proposed edit is made in: without the cells that train, one layer is left."""
    text = source(name).rpartition("# %% [markdown]")[0]
    found = re.search(r"^# %% \[markdown\]\n# ## (Four layers, and training|Training, by)", text, flags=re.M)
    return text[: found.start()] + text[text.index("page.end()") :] if found else text


def values(table: dict, names: dict) -> dict:
    """A table's numbers, of which some are written as formulas."""
    return {key: eval(value, names) if isinstance(value, str) else value for key, value in table.items()}


def pinned() -> dict[str, dict]:
    """{chapter: {question: value or word}} of pinned.toml."""
    table, names = tomllib.loads((HERE / "pinned.toml").read_text(encoding="utf-8")), {"exp": exp, "expm1": expm1}
    for name, formula in table.pop("names").items():
        names |= values({name: formula}, names)
    return {chapter: values(answers, names) for chapter, answers in table.items()}


PINNED = pinned()
TRIED = tomllib.loads((HERE / "tried.toml").read_text(encoding="utf-8"))
