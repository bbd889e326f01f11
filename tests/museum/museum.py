"""A museum of silent bugs: `python tests/museum/museum.py` plants each bug of bugs.toml in a copy of the source and
prints the table of docs/museum.md, which says how each bug is found. It exits with 1 if a bug is not found.

Each is a published bug that gave wrong numbers and no error. It is planted by `edits` of this project's own source,
{text in the file: its replacement}, which do here what the bug did there. It is found in one of three ways: a rule of
the judge, which runs the file on an abstract mesh (`refused`), the error of a call on an AbstractMesh, where nothing is
sent (`raises`), or a test that compares with one device (`fails`)."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "check"))
from mutant_programs import judgement

from scaling.check import check_source
from scaling.check.files import check_lines
from scaling.check.findings import RULES
from scaling.common import console
from scaling.common.console import Parser
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.strategies.transformer import api

ROOT = Path(__file__).parents[2]
PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
CALLS: dict[str, tuple[Config, dict, dict]] = {  # model, mesh and options; an AbstractMesh sends nothing
    "experts": (PLAIN.with_(E=4, k=2), {"X": 2, "E": 2}, {}),
    "one_kv_head": (PLAIN.with_(K=1), {"Y": 2}, {}),
    "two_way": (PLAIN, {"Y": 2}, {}),
    "in_blocks": (PLAIN.with_(D=256, F=256, H=64), {"X": 4}, {"precision": "fp8-128", "zero": 2}),
}


class Bug(NamedTuple):
    """`there`: where it happened, as owner/name#number; `what`: what went wrong there."""

    name: str
    there: str
    what: str
    file: str
    edits: dict[str, str]
    refused: str = ""
    raises: Sequence[str] = ("", "")
    fails: str = ""

    @property
    def links(self) -> list[str]:
        return ["https://github.com/" + place.replace("#", "/issues/") for place in self.there.split()]


def bugs() -> Iterator[Bug]:
    """Those of bugs.toml."""
    for bug in tomllib.loads(Path(__file__).with_name("bugs.toml").read_text(encoding="utf-8"))["bug"]:
        yield Bug(**bug | {"edits": {edit["of"]: edit["is"] for edit in bug["edits"]}})


BUGS = tuple(bugs())


def planted(bug: Bug) -> str:
    """The file's text with the bug."""
    text = (ROOT / bug.file).read_text(encoding="utf-8")
    for old, new in bug.edits.items():
        if text.count(old) != 1:
            raise ValueError(f"{bug.name}: {bug.file} has {text.count(old)} of {old!r}: rewrite the edit")
        text = text.replace(old, new)
    return text


def rules_broken(file: str, text: str) -> Iterator[str]:
    """The rules that a file of this text breaks: first of its lines alone, then as the judge runs it."""
    of_lines = check_source(text, file) if "STRATEGY =" in text else check_lines(text, file)[0]
    yield from (fault.rule for fault in of_lines)
    yield from (fault.rule for fault in judgement(file, text).findings)


@cache
def broken_as_it_is(file: str) -> list[str]:
    return list(rules_broken(file, (ROOT / file).read_text(encoding="utf-8")))


def answer(name: str) -> str:
    """The error that a call gets; "" if it gets none."""
    config, sizes, options = CALLS[name]
    mesh = AbstractMesh(sizes)
    tokens = torch.empty(2, 64, dtype=torch.int64, device="meta")
    try:
        params = api.shard(model.init(config, 0, torch.float32, "meta"), config, mesh, zero=options.get("zero", 3))
        api.loss_and_grads(params, tokens, tokens, config, mesh, **options)
    except ValueError as error:
        return f"{type(error).__name__} {error}"
    return ""


def answer_with(bug: Bug) -> str:
    """The error that its call gets while its module has what the edited text defines."""
    module = importlib.import_module(bug.file.removesuffix(".py").replace("/", "."))
    edited = ModuleType(module.__name__)
    exec(compile(planted(bug), bug.file, "exec"), edited.__dict__)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vars(edited).items():
            own = getattr(value, "__module__", "") == module.__name__
            if own and (isinstance(value, FunctionType) or hasattr(value, "cache_clear")):
                patch.setattr(module, name, value)
        return answer(bug.raises[0])


def tested(bug: Bug, plant: bool) -> str:
    """What the test that sees a bug prints in a copy of the project, with the bug or without it."""
    with tempfile.TemporaryDirectory(prefix="museum-") as folder:
        for part in ("scaling", "tests"):
            shutil.copytree(ROOT / part, f"{folder}/{part}", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        if plant:
            Path(folder, bug.file).write_text(planted(bug), encoding="utf-8")
        env = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", bug.fails]
        run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        return run.stdout + run.stderr


def seen(bug: Bug) -> bool:
    """Whether the bug, planted, is answered as bugs.toml says; and, without it, nothing is."""
    if bug.refused:
        return bug.refused in rules_broken(bug.file, planted(bug)) and not broken_as_it_is(bug.file)
    if bug.fails:
        printed = tested(bug, True)  # it must fail by what is compared: a crash is not silent
        words = "AssertionError" if "RankFailed" in printed else "(assert |AssertionError)"  # else also lines of ranks
        held = re.search(rf"^E +{words}", printed, re.M) and "1 failed" in printed
        return bool(held) and " passed" in tested(bug, False)
    call, words = bug.raises
    return not answer(call) and words in answer_with(bug)


def here(bug: Bug) -> str:
    """What happens here, in a few words."""
    if bug.refused:
        return f"refused before it runs [{bug.refused}]: {RULES[bug.refused]}"
    if bug.raises[0]:
        return f"ShardingError before anything is sent: {bug.raises[1]}"
    file, _, test = bug.fails.rpartition("/")[2].partition("[")[0].partition("::")
    return f"fails {file}: {test.removeprefix('test_').replace('_', ' ')}"


def table() -> str:
    rows = [(i, bug.name, bug.what, here(bug)) for i, bug in enumerate(BUGS, 1)]
    shown = console.table(rows, ["", "bug", "what happened there", "what happens here"], 100)
    typed = sum(not bug.fails for bug in BUGS)
    return f"{shown}\n{typed} of {len(BUGS)} are refused by type, {len(BUGS) - typed} by a test against one device.\n"


def main() -> int:
    unseen = [bug.name for bug in BUGS if not seen(bug)]
    print(table(), end="")
    for name in unseen:
        print(f"not seen: {name}")
    return 1 if unseen else 0


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    sys.exit(main())
