"""Bad values at the command line, of every option of every command and chapter: one clear error, or the right result.

The options come from the parsers themselves. A case gives one or two of them values that are wrong in many ways, or
gives a command a file (of a model, a chip, a run, requests) of which one key is wrong. It ends well if the command

- ends by itself within its time, with exit status 0, 1 or 2, by no exception of Python's;
- when it refuses, says why on the error stream, in few lines, with the choices or a fix, and writes no file;
- prints nothing wider than 100 columns.

With `--each` there is one case for each option alone, in turn: `--only 0,1 --each` does so with the chapters. Every
case is a fork of this process, in a folder of its own.
"""

import argparse
import contextlib
import copy
import importlib
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

CHAPTERS = Path(__file__).parents[2] / "chapters"
SECONDS, LINES = 60.0, 12  # of a case; of an error
TRAIN = "--data text.txt --model tiny.json --batch 2 --seq 16 --steps 1 --eval-batches 1"
GIVE = "--model hf --max-new-tokens 2"
COMMANDS = {  # name: (module, arguments that are right and soon done)
    "train": ("train.command", TRAIN),
    "train dry": ("train.command", f"--dry-run {TRAIN}"),
    "train resume": ("train.command", "--resume --out run --steps 3"),
    "train tokenize": ("train.corpus:tokenize", "--data text.txt --out tokens"),
    "train compare": ("train.compare", "run run"),
    "train export": ("train.export", "run --out exported"),
    "train flight": ("train.flight", "run"),
    "train verify": ("train.compare:verify_run", "run"),
    "generate": ("serve.generate_command", f"{GIVE} --prompt ab"),
    "serve": ("serve.command", f"{GIVE} --input request.json --output completions.jsonl"),
    "show": ("show", "A[I_X,J_Y]"),
    "show schedule": ("show.timelines", "1f1b"),
    "show params": ("show.params", "--model tiny.json --mesh X=2"),
    "check": ("check", "program.py"),
    "plan": ("plan.__main__", "--model llama3-8b --chip v5e --chips 16 --batch 1M"),
    "plan guide": ("plan.guide", "--model llama3-8b --gpu h100"),
    "plan published": ("plan.published", "--only llama"),
    "plan serve": ("plan.serve.command", "--model llama3-8b --chip v5e --context 2048 --chips 4"),
    "plan serve published": ("plan.serve.published", "--only v5e"),
    "measure": ("measure.command", "--chip machine.toml --no-check"),
    "measure network": ("measure.network", "--repeats 1"),
    "notebook": ("book.notebook", "program.py"),
}
TEXTS = ["", " ", "-1", "0", "1", "2", "3", "7", "1.5", "-0.0", "1e3", "1e400", "nan", "inf", "-inf", "9" * 20,
         "9" * 400, "x", "x" * 300, "é", "none", "a,b", ",", "=", "1/3", "1/0", "[]", "{}", "A[I_X", "%s"]  # fmt: skip
MESHES = ["X", "X=", "X=0", "X=-1", "X=1.5", "X=2,X=2", "X=3", "X=1000000", "X=" + "9" * 30, "XY=2", "x=2", "Q=2",
          "X=2,", "Y=3", "C=5", "E=2", "Z=3", "X=2 Y=2", "tensor=0", "tensor=2,tensor=2", "tensor=3"]  # fmt: skip
FILES = ["gone", "gone/gone", "folder", "empty", "binary", "broken.json", "broken.toml", "list.json", "text.txt",
         "link", "binary.json", "binary.toml", "folder.json", "/dev/null", "/proc/nothing/x", "machine.toml", "hf",
         "run", "-"]  # fmt: skip
WRONG = [None, True, -1, 0, 1.5, 10**30, math.inf, math.nan, "", "x", [], {}, [1, "x"], {"x": 1}]
DOCUMENTS = {  # file: commands that read it
    "tiny.json": ["train dry", "show params"],
    "hf/config.json": ["generate", "serve"],
    "hf/tokenizer.json": ["generate"],
    "run/run.toml": ["train resume", "train export", "train compare"],
    "options.toml": ["train dry"],
    "model.toml": ["plan", "plan guide", "plan serve"],
    "machine.toml": ["plan", "measure", "plan serve"],
    "request.json": ["serve"],
}
GIVEN = {"options.toml": "--config", "model.toml": "--model", "machine.toml": "--chip", "request.json": "--input"}
TINY = {"name": "tiny", "L": 2, "D": 32, "F": 64, "N": 4, "K": 2, "H": 8, "V": 256}
ALL = {"gated": True, "E": 2, "k": 1, "window": [4, None], "rope_scaling": {"type": "linear", "factor": 2.0}}
MACHINE = {
    "kind": "cpu", "hbm_bytes": 8e9, "hbm_bw": 1e10, "flops": {"fp32": 1e11, "bf16": 1e11},
    "efficiency": {"attention": 0.5, "matmul": {"bf16": 0.5}}, "source": "a test",
    "levels": [{"name": "node", "degree": 2, "link_bw": 1e9}],
    "measured": [{"op": "AllReduce", "ranks": 2, "latency": 1e-5, "bandwidth": 1e9, "alone": False}],
}  # fmt: skip
REQUEST = {"id": "a", "prompt": "ab", "max_new_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
           "seed": 1, "stop": ["x"], "arrival": 0.0}  # fmt: skip
RIGHT = {
    "tiny.json": TINY, "model.toml": TINY | ALL, "machine.toml": MACHINE, "request.json": REQUEST,
    "options.toml": {"lr": 0.1, "warmup": 2, "mesh": "X=1", "dtype": "fp32", "norms": False},
}  # fmt: skip
BYTES = bytes(range(256)) * 9
HERE = {  # what lies in the folder of a case, beside what is RIGHT
    "text.txt": b"".join(b"line %d of a small text, said again and again\n" % i for i in range(300)),
    "program.py": b"import torch\n", "empty": b"", "list.json": b"[1]",
    "binary": BYTES, "binary.json": BYTES, "binary.toml": BYTES, "broken.json": b"{", "broken.toml": b"a =",
}  # fmt: skip


def written(name: str, document) -> str:
    """A document as text: TOML if the file's name says so, with what stands in a table on one line each."""
    if name.endswith(".json") or not isinstance(document, dict):
        return json.dumps(document)
    text = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in document.items())
    for ours, theirs in {'": ': '" = ', "null": '"none"', "Infinity": "inf", "NaN": "nan"}.items():
        text = text.replace(ours, theirs)
    return text


def drawn(name: str, options: list[argparse.Action], draw: random.Random) -> list[str]:
    """Arguments of a command, one or two of them wrong."""
    arguments = COMMANDS[name][1].split() if name in COMMANDS else []
    for action in draw.sample(options, min(len(options), draw.choice([1, 1, 1, 2]))):
        kinds = (TEXTS, MESHES, FILES, [*map(str, action.choices or ["1"])])
        weights = (3, 6 if "mesh" in action.dest else 0.2, 2, bool(action.choices))
        value = draw.choice(draw.choices(kinds, weights)[0])
        if action.option_strings:
            arguments.append(action.option_strings[0] + ("" if action.nargs == 0 else f"={value}"))
        else:
            arguments[0] = value
    return arguments


def spoiled(document: dict, draw: random.Random) -> tuple[object, str]:
    """(a copy of which one value is wrong or gone, or which has a key too many; what was done)."""
    top, wrong = {"": copy.deepcopy(document)}, draw.choice(WRONG)
    places: list = [(top, "", "")]
    for holder, key, words in places:  # which grows meanwhile
        value = holder[key]
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, below, f"{words}.{below}") for below in keys]
    holder, key, words = draw.choice(places)
    if draw.random() < 0.15 and holder is not top:
        del holder[key]
        return top[""], f"{words} left out"
    if draw.random() < 0.1 and isinstance(holder[key], dict):
        holder, key, words = holder[key], "unknown", f"{words}.unknown"
    holder[key] = wrong
    return top[""], f"{words} = {wrong!r}"


def prepare(folder: Path) -> None:
    """Put into the folder what is right, to be spoiled, and files that are wrong."""
    os.chdir(folder)
    for name, data in HERE.items():
        Path(name).write_bytes(data)
    for name, document in RIGHT.items():
        Path(name).write_text(written(name, document))
    for name in ("folder", "folder.json"):
        Path(name).mkdir()
    Path("link").symlink_to("gone")
    for name, arguments in (("train", f"{TRAIN} --out run"), ("train export", "run --out hf")):
        if (ended := forked(partial(start, name, arguments.split())))[0]:
            raise ValueError(f"{name} {arguments}: {ended}")


def start(name: str, arguments: list[str]) -> int:
    """Run a command or a chapter with these arguments in this process; its exit status."""
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        return getattr(importlib.import_module(f"scaling.{module}"), function or "main")(arguments)
    sys.argv = [str(CHAPTERS / f"{name}.py"), "--small", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser that a command or a chapter makes, caught where it is to read the arguments."""
    parsers = []

    def caught(parser, *_, **__):
        parsers.append(parser)
        raise SystemExit

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", caught), contextlib.suppress(SystemExit):
        start(name, [])
    assert parsers, f"{name} made no parser"
    return parsers[0]


def forked(run: Callable[[], int]) -> tuple[int | None, str, str]:
    """(exit status or None if it took too long, what was said on the output, and on the error stream) of a child."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def child() -> None:
            os.setpgid(0, 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.exit(run())

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(SECONDS)
        status = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            assert process.pid
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
        return status, *said


def judged(status: int | None, out: str, err: str, new: list[str]) -> str:
    """What is wrong with the end of a case; "" if nothing."""
    said = re.sub(r"(?s)^usage:.*?\n(?=\S)", "", err).strip().splitlines()
    shown = re.sub(r"\x1b\[[\d;]*m", "", err + ("" if out.startswith(("{", "[")) else out)).splitlines()
    if status is None:
        return f"no end in {SECONDS:.0f} s: {(out + err)[-200:]}"
    if "Traceback" in err or status not in (0, 1, 2):
        return f"exit status {status}: {said[-1][:200] if said else ''}"
    if wide := next((line for line in shown if len(line) > 100 and line[0] != "{"), ""):
        return f"{len(wide)} columns: {wide[:150]}"
    if status and not said and not out:
        return f"exit status {status}, and no word"
    if status and len(said) > LINES:
        return f"an error of {len(said)} lines: {' / '.join(said)[:200]}"
    new = [path for path in new if not path.endswith(".before")]  # a flight record that was kept
    if status and new:
        return f"refused, and wrote {', '.join(new)[:80]}: {said[-1][:200] if said else ''}"
    return ""


def case(name: str, options: list[argparse.Action], base: Path, draw: random.Random) -> tuple[str, int | None, str]:
    """(what was given, the exit status, what is wrong with it) of one draw, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        shutil.copytree(base, folder, symlinks=True, dirs_exist_ok=True)
        os.chdir(folder)
        read = [file for file, readers in DOCUMENTS.items() if name in readers]
        if read and draw.random() < 0.5:
            file = Path(draw.choice(read))
            table, how = spoiled((tomllib if file.suffix == ".toml" else json).loads(file.read_text()), draw)
            file.write_text(written(file.name, table))
            how = f"{file}: {how}"
            given = [GIVEN[file.name], file.name] if file.name in GIVEN else []
            arguments = [*COMMANDS[name][1].split(), *given]
        else:
            arguments, how = drawn(name, options, draw), ""
        before = {*Path().rglob("*")}
        status, out, err = forked(partial(start, name, arguments))
        new = sorted(str(path) for path in {*Path().rglob("*")} - before)
        os.chdir(base)
        return f"{name} {how} {' '.join(arguments)}", status, judged(status, out, err, new)


def run(cases: int, seed: int, only: str, each: bool) -> tuple[Counter, list[str]]:
    """(how often each exit status came, what was wrong)."""
    names = [*COMMANDS, *(path.stem for path in sorted(CHAPTERS.glob("[0-9]*.py")))]
    names = [name for name in names if name.startswith(tuple(only.split(",")))]
    tally, wrong, draw = Counter(), [], random.Random(seed)
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory(prefix="commands-") as base, contextlib.chdir(base):
        prepare(Path(base))
        options = {name: [act for act in parser_of(name)._actions if act.dest != "help"] for name in names}
        some = sorted(draw.choices(names, [4 if name in COMMANDS else 1 for name in names], k=cases))
        alone = [(name, [option]) for name in names for option in options[name]]
        for name, chosen in alone if each else [(name, options[name]) for name in some]:
            words, status, why = case(name, chosen, Path(base), draw)
            tally[status] += 1
            if why:
                wrong.append(f"{words[:150]}\n    {why}")
                print(wrong[-1], flush=True)
    return tally, wrong
