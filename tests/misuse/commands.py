"""Bad values at the command line, of every option of every command and chapter: one clear error, or the right result.

    python tests/sweeps/fuzz.py commands [--cases 2500] [--seed 0] [--only train,show] [--each] [--show]

The options come from the parsers themselves. A case gives one or two of them values that are wrong in many ways, or
gives a command a file (of a model, a chip, a run, requests) of which one key is wrong. It ends well if the command

- ends by itself within its time, with exit status 0, 1 or 2, by no exception of Python's;
- when it refuses, says why on the error stream, in few lines, with the choices or a fix, and writes no file;
- prints nothing wider than 100 columns.

With `--each` there is one case for each option alone, in turn: `--only 0,1 --each` does so with the chapters. Every
case is a fork of this process, in a folder of its own. `--show` prints what was said, to be read.
"""

import argparse
import contextlib
import copy
import importlib
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

CHAPTERS = Path(__file__).parents[2] / "chapters"
SECONDS, LINES = 60.0, 12  # of a case; of an error


TRAIN = ["--data", "text.txt", "--model", "tiny.json", "--batch", "2", "--seq", "16", "--steps", "1",
         "--eval-batches", "1"]  # fmt: skip
GIVE = ["--model", "hf", "--max-new-tokens", "2"]
PLAN = ["--model", "llama3-8b", "--chip", "v5e", "--chips", "16", "--batch", "1M"]
PLAN_SERVE = ["--model", "llama3-8b", "--chip", "v5e", "--context", "2048", "--most", "4"]
COMMANDS = {  # name: (module, arguments that are right and soon done)
    "train": ("scaling.train.command", TRAIN),
    "train dry": ("scaling.train.command", ["--dry-run", *TRAIN]),
    "train resume": ("scaling.train.command", ["--resume", "--out", "run", "--steps", "3"]),
    "train tokenize": ("scaling.train.tokenize", ["--data", "text.txt", "--out", "tokens"]),
    "train compare": ("scaling.train.compare", ["run", "run"]),
    "train export": ("scaling.train.export", ["run", "--out", "exported"]),
    "train flight": ("scaling.train.flight", ["run"]),
    "train verify": ("scaling.train.verify", ["run"]),
    "generate": ("scaling.generate.command", [*GIVE, "--prompt", "ab"]),
    "serve": ("scaling.serve.command", [*GIVE, "--input", "request.json", "--output", "completions.jsonl"]),
    "show": ("scaling.show", ["A[I_X, J_Y]"]),
    "show schedule": ("scaling.show.schedules", ["1f1b"]),
    "show params": ("scaling.show.params", ["--model", "tiny.json", "--mesh", "X=2"]),
    "check": ("scaling.check", ["program.py"]),
    "plan": ("scaling.plan.__main__", PLAN),
    "plan guide": ("scaling.plan.guide", ["--model", "llama3-8b", "--gpu", "h100"]),
    "plan published": ("scaling.plan.published", ["--only", "llama"]),
    "plan serve": ("scaling.plan.serve.command", PLAN_SERVE),
    "plan serve published": ("scaling.plan.serve.published", ["--only", "v5e"]),
    "measure": ("scaling.measure.command", ["--chip", "machine.toml", "--no-check"]),
    "measure network": ("scaling.measure.network", ["--repeats", "1"]),
    "notebook": ("scaling.book.notebook", ["program.py"]),
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
GIVEN = {"options.toml": ["--config", "options.toml"], "model.toml": ["--model", "model.toml"],
         "machine.toml": ["--chip", "machine.toml"], "request.json": ["--input", "request.json"]}  # fmt: skip
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


def written(name: str, document) -> str:
    """A document as text: TOML if the file's name says so, with what stands in a table on one line each."""

    def value(x) -> str:
        if isinstance(x, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {value(inner)}" for key, inner in x.items()) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(value, x)) + "]"
        return '"none"' if x is None else str(x) if isinstance(x, float) else json.dumps(x)

    if name.endswith(".json"):
        return json.dumps(document)
    if not isinstance(document, dict):
        return "1"
    return "".join(f"{json.dumps(key)} = {value(x)}\n" for key, x in document.items())


def drawn(name: str, options: list[argparse.Action], draw: random.Random) -> list[str]:
    """Arguments of a command, one or two of them wrong."""
    arguments = list(COMMANDS[name][1]) if name in COMMANDS else []
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
        holder[key]["unknown"] = wrong
        return top[""], f"{words}.unknown = {wrong!r}"
    holder[key] = wrong
    return top[""], f"{words} = {wrong!r}"


def prepare(folder: Path) -> None:
    """Put into the folder what is right, to be spoiled, and files that are wrong."""
    os.chdir(folder)
    Path("text.txt").write_text("".join(f"line {i} of a small text, said again and again\n" for i in range(300)))
    for name, document in RIGHT.items():
        Path(name).write_text(written(name, document))
    Path("program.py").write_text("import torch\n")
    for name in ("folder", "folder.json"):
        Path(name).mkdir()
    for name in ("empty", "binary", "binary.json", "binary.toml"):
        Path(name).write_bytes(b"" if name == "empty" else bytes(range(256)) * 9)
    for name, text in (("broken.json", "{"), ("broken.toml", "a ="), ("list.json", "[1]")):
        Path(name).write_text(text)
    Path("link").symlink_to("gone")
    for name, arguments in (("train", [*TRAIN, "--out", "run"]), ("train export", ["run", "--out", "hf"])):
        if (ended := forked(lambda name=name, arguments=arguments: start(name, arguments)))[0]:
            raise ValueError(f"{name} {' '.join(arguments)}: {ended}")


def start(name: str, arguments: list[str]) -> int:
    """Run a command or a chapter with these arguments in this process; its exit status."""
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0]).main(arguments)
    sys.argv = [str(CHAPTERS / f"{name}.py"), "--small", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser that a command or a chapter makes, caught where it is to read the arguments."""

    class Found(BaseException):
        pass

    def caught(parser, *_, **__):
        raise Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", caught):
        try:
            raise ValueError(f"{name} made no parser: {start(name, [])}")
        except Found as found:
            return found.args[0]


def forked(run: Callable[[], int], seconds: float = SECONDS) -> tuple[int | None, str, str]:
    """(exit status or None if it took too long, what was said on the output, and on the error stream) of a child."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        if not (pid := os.fork()):
            os.setpgid(0, 0)
            for file, number in ((out, 1), (err, 2)):
                os.dup2(file.fileno(), number)
            code = 99
            try:
                code = run()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code or 0)
        end = time.monotonic() + seconds
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(ended[1]) if ended[0] else os.waitpid(pid, 0) and None
        for file in (out, err):
            file.seek(0)
        return status, *(file.read().decode(errors="replace") for file in (out, err))


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


def case(
    name: str, options: list[argparse.Action], base: Path, draw: random.Random
) -> tuple[str, int | None, str, str]:
    """(what was given, the exit status, what is wrong with it, what was said) of one draw, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="case-") as folder:
        shutil.copytree(base, folder, symlinks=True, dirs_exist_ok=True)
        os.chdir(folder)
        read = [file for file, readers in DOCUMENTS.items() if name in readers]
        if read and draw.random() < 0.5:
            document = draw.choice(read)
            text = Path(document).read_text()
            table, words = spoiled(tomllib.loads(text) if document.endswith("toml") else json.loads(text), draw)
            Path(document).write_text(written(document, table))
            arguments, words = [*COMMANDS[name][1], *GIVEN.get(document, [])], f"{name}: {document}{words}"
        else:
            arguments = drawn(name, options, draw)
            words = f"{name} {' '.join(arguments)}"
        before = {*Path().rglob("*")}
        status, out, err = forked(lambda: start(name, arguments))
        new = sorted(str(path) for path in {*Path().rglob("*")} - before)
        os.chdir(base)
        return words, status, judged(status, out, err, new), (err or out).strip()


def run(cases: int, seed: int, only: list[str], each: bool, show: bool) -> tuple[Counter, list[str]]:
    """(how often each exit status came, what was wrong)."""
    names = [*COMMANDS, *(path.stem for path in sorted(CHAPTERS.glob("[0-9]*.py")))]
    names = [name for name in names if not only or any(name.startswith(word) for word in only)]
    here, tally, wrong, draw = Path.cwd(), Counter(), [], random.Random(seed)
    os.environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory(prefix="commands-") as base:
        prepare(Path(base))
        for name in names:
            options = [action for action in parser_of(name)._actions if action.dest != "help"]
            weight = 4 if name in COMMANDS else 1
            draws = [options] * max(1, cases * weight // (4 * len(COMMANDS) + 39))
            for chosen in [[option] for option in options] if each else draws:
                words, status, why, said = case(name, chosen, Path(base), draw)
                tally[status] += 1
                if why:
                    wrong.append(f"{words[:150]}\n    {why}")
                    print(wrong[-1], flush=True)
                if show and not why:
                    print(f"{status} {words}\n    {said[-300:]}", flush=True)
        os.chdir(here)
    return tally, wrong
