"""A museum of silent bugs: `python tests/museum/museum.py` plants each of `bugs` in a copy of the source, sees what
comes of it here, and prints the table that docs/museum.md shows. It ends with 1 if a bug goes unseen."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
from bugs import BUGS, Bug
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1] / "check"))
from mutant_programs import judgement

from scaling.check import check_source
from scaling.check.findings import RULES
from scaling.check.lines import check_lines
from scaling.common.console import Parser
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.strategies.transformer import api

ROOT = Path(__file__).parents[2]
PLAIN = Config("plain", 2, 16, 24, 4, 2, 8, 32)
CALLS = {  # on an AbstractMesh, where nothing is sent
    "experts": (PLAIN.with_(E=4, k=2), {"X": 2, "E": 2}),
    "one_kv_head": (PLAIN.with_(K=1), {"Y": 2}),
    "two_way": (PLAIN, {"Y": 2}),
}


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
    config, sizes = CALLS[name]
    mesh = AbstractMesh(sizes)
    tokens = torch.empty(2, 8, dtype=torch.int64, device="meta")
    try:
        params = api.shard(model.init(config, 0, torch.float32, "meta"), config, mesh)
        api.loss_and_grads(params, tokens, tokens, config, mesh)
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
    """Whether the bug, planted, is answered as `bugs` says; and, without it, nothing is."""
    if bug.refused:
        return bug.refused in rules_broken(bug.file, planted(bug)) and not broken_as_it_is(bug.file)
    if bug.fails:
        printed = tested(bug, True)  # it must fail by what is compared: a crash is not silent
        held = re.search(r"^E +(assert |AssertionError)", printed, re.M) and "1 failed" in printed
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
    widths = [None, 22, 33, 31]
    grid = tabulate(rows, ["", "bug", "what happened there", "what happens here"], "grid", maxcolwidths=widths)
    typed = sum(not bug.fails for bug in BUGS)
    return f"{grid}\n{typed} of {len(BUGS)} are refused by type, {len(BUGS) - typed} by a test against one device.\n"


def main() -> int:
    unseen = [bug.name for bug in BUGS if not seen(bug)]
    print(table(), end="")
    for name in unseen:
        print(f"not seen: {name}")
    return 1 if unseen else 0


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    sys.exit(main())
