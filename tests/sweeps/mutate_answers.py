"""Change a computation behind the chapters' answers, one at a time: a verdict, a check or a pinned value must turn red.

    python tests/sweeps/mutate_answers.py 01_roofline 04_problems    the chapters' own cells; without names, all
    python tests/sweeps/mutate_answers.py scaling/cost/transformer.py    a module, under the chapters that call it
    python tests/sweeps/mutate_answers.py --part=1/4 05_pods    every fourth mutant of a chapter, from the second on
    python tests/sweeps/mutate_answers.py --sample=60 05_pods    about so many, drawn at random, the same every time

A mutant doubles a number (0 becomes 1), swaps * with / or + with -, turns ** into *, turns a comparison around, makes
min of max, or swaps the first two arguments of another call. It runs in a fork of a process that is already at its
cell. Printed: each mutant that left every verdict green and changed an answer, with `--text` also those that changed
printed text alone, with the first line that changed; the others are counted. What comes after a chapter's last answers
and checks is left as it is, and cells that train are left out: they hold ranks against one device, whatever the
numbers. Not part of the suite.
"""

import ast
import contextlib
import importlib
import io
import json
import math
import os
import random
import signal
import sys
import time
from itertools import zip_longest
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "book")]

import running  # noqa: E402
from pinned import PINNED  # noqa: E402

from scaling.common.console import Parser  # noqa: E402

OPTIONS = {word for word in sys.argv[1:] if word.startswith("--")}
SAMPLE = int(next((o[9:] for o in OPTIONS if o.startswith("--sample=")), "0"))
PART, PARTS = map(int, next((o[7:] for o in OPTIONS if o.startswith("--part=")), "0/1").split("/"))
SLOWER, AT_LEAST = 10, 60  # a mutant that takes so many times the chapter's seconds, and so many, counts as red
SWAPS = {ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Pow: ast.Mult}
SWAPS |= {ast.FloorDiv: ast.Mult, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt}
JUDGED = ("answers", "check", "same", "equal")  # methods of a page that hold
SHOWN = ("say", "title", "chart", "picture")  # methods of a page that only show
WORDS = {"unit", "note", "erratum", "height", "digits", "check", "marks", "log"}  # arguments that are no computation


def sites(tree: ast.AST) -> list[ast.AST]:
    """The nodes that a mutant changes, in order: not what is only shown, the book's own numbers or notes."""
    found = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr | ast.Assert | ast.Raise):
            return
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in (*SHOWN, "Page"):
                return
            swappable = len(node.args) > 1 and name not in ("Answer", *JUDGED) and not starred(node)
            named = isinstance(node.func, ast.Name) and name in ("min", "max")
            found.extend([node] if named or swappable else [])
            args = node.args[2:3] if name == "Answer" else node.args
            for child in [node.func, *args, *(k.value for k in node.keywords if k.arg not in WORDS)]:
                visit(child)
            return
        number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        swapped = isinstance(node, ast.BinOp) and type(node.op) in SWAPS
        turned = isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS
        found.extend([node] if number or swapped or turned else [])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def starred(node: ast.Call) -> bool:
    return any(isinstance(arg, ast.Starred) for arg in node.args[:2])


def mutate(node: ast.AST) -> str:
    """Change the node in place; what was done, in words."""
    before = ast.unparse(node)
    if isinstance(node, ast.Constant):
        node.value = node.value * 2 if node.value else 1
    elif isinstance(node, ast.BinOp):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        node.func = ast.Name({"min": "max", "max": "min"}[node.func.id], ast.Load())
    else:
        node.args[:2] = node.args[1::-1]
    return f"{before[:60]} -> {ast.unparse(ast.fix_missing_locations(node))[:60]}"


def forked(fn, seconds: float = math.inf) -> dict | None:
    """What `fn()` gives in a child process, as JSON; None if it dies or takes longer than so many seconds."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.close(read)
        os.setpgid(0, 0)
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            os.dup2(null.fileno(), 2)
            try:
                os.write(write, json.dumps(fn()).encode())
            finally:
                os._exit(0)
    os.close(write)
    data, end = b"", time.monotonic() + seconds
    os.set_blocking(read, False)
    while time.monotonic() < end:
        try:
            if not (part := os.read(read, 65536)):
                break
            data += part
        except BlockingIOError:
            time.sleep(0.005)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os.close(read)
    os.waitpid(pid, 0)
    return json.loads(data) if data else None


def outcome(chapter: str, names: dict, blocks: list[CodeType], text: io.StringIO) -> dict:
    """Run the rest of a chapter: whether anything is red, its answers, and what it printed."""
    red = ""
    try:
        with contextlib.redirect_stdout(text):
            for block in blocks:
                exec(block, names)
    except SystemExit as error:
        red = str(error.code or "")
    except BaseException as error:
        red = f"{type(error).__name__}: {error}"
    page = names["page"]
    pinned, given = PINNED.get(chapter, {}), {a.question: a.ours for a in page.given}
    for question, want in pinned.items():
        got = given.get(question)
        near = got == want if isinstance(want, str) else isinstance(got, int | float) and close(got, want)
        red = red or ("" if near else f"pinned: {question}")
    values = {q: v if isinstance(v, str) else float(v) for q, v in given.items()}
    return {"red": red or ", ".join(page.failures), "answers": values, "text": text.getvalue().split("What held")[0]}


def close(got: float, want: float) -> bool:
    return abs(got - want) <= 1e-9 * abs(want) or got == want


def judge(name: str, line: int, words: str, got: dict | None, base: dict, tally: dict) -> None:
    if got is None or got["red"]:
        return tally.__setitem__("red", tally["red"] + 1)
    changed = [q for q, v in base["answers"].items() if got["answers"].get(q) != v]
    kind = "answer" if changed else "text" if got["text"] != base["text"] else "nothing"
    tally[kind] += 1
    if kind == "answer" or (kind == "text" and "--text" in OPTIONS):
        print(f"  {kind:<6} {name}:{line}: {words}" + (f"  [{changed[0]}]" if changed else ""), flush=True)
    if kind == "text" and "--text" in OPTIONS:
        pairs = zip_longest(base["text"].splitlines(), got["text"].splitlines())
        print(next(f"      was {was}\n      now {now}" for was, now in pairs if was != now), flush=True)


def mutate_chapter(name: str, tally: dict) -> None:
    """Every mutant of a chapter's cells, each forked where its top-level statement begins."""
    os.environ["COLUMNS"] = "80"
    path = str(running.CHAPTERS / f"{name}.py")
    sys.argv = [path, "--small"]
    source = running.without_training(running.source(name))
    tree = ast.parse(source, path)
    names, text = {"__name__": "__main__", "__file__": path}, io.StringIO()
    blocks = [compile(ast.Module([node], []), path, "exec") for node in tree.body]
    began = time.monotonic()
    base = forked(lambda: outcome(name, names, blocks, text))
    longest = AT_LEAST + SLOWER * (time.monotonic() - began)
    if not base or base["red"]:
        raise SystemExit(f"{name}: red before any mutant: {base and base['red']}")
    done = -1
    last = max(i for i, node in enumerate(tree.body) if any(f"page.{word}(" in ast.unparse(node) for word in JUDGED))
    total = sum(len(sites(node)) for node in tree.body[: last + 1])
    drawn, chance = random.Random(0), SAMPLE / total if SAMPLE else 1.0
    for i, node in enumerate(tree.body[: last + 1]):
        for n, site in enumerate(sites(node) if "page" in names else []):
            if (done := done + 1) % PARTS != PART or drawn.random() >= chance:
                continue
            changed = ast.parse(source, path).body[i]
            words = mutate(sites(changed)[n])
            block = compile(ast.Module([changed], []), path, "exec")
            got = forked(lambda block=block, i=i: outcome(name, names, [block, *blocks[i + 1 :]], text), longest)
            judge(name, site.lineno, words, got, base, tally)
        with contextlib.redirect_stdout(text):
            exec(blocks[i], names)


def whole(name: str) -> dict:
    """A chapter from its beginning, in this process."""
    path = str(running.CHAPTERS / f"{name}.py")
    sys.argv = [path, "--small"]
    block = compile(running.source(name), path, "exec")
    return outcome(name, {"__name__": "__main__", "__file__": path, "page": None}, [block], io.StringIO())


def functions(tree: ast.Module) -> list[tuple[ast.FunctionDef, str]]:
    """The module's functions and methods, with their names from the module down."""
    found = [(node, node.name) for node in tree.body if isinstance(node, ast.FunctionDef)]
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        found += [(n, f"{owner.name}.{n.name}") for n in owner.body if isinstance(n, ast.FunctionDef)]
    return found


def code_of(code: CodeType, qualname: str) -> CodeType:
    for part in qualname.split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
    return code


def mutate_library(file: str, tally: dict) -> None:
    """Every mutant of a module's functions, put in place of the function's code, under the chapters that call it."""
    os.environ["COLUMNS"] = "80"
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    path, text = module.__file__, Path(module.__file__).read_text(encoding="utf-8")
    bases, callers, longest = {}, {}, {}

    def traced(name: str) -> dict:
        called = set()
        sys.setprofile(lambda frame, *_: frame.f_code.co_filename == path and called.add(frame.f_code.co_qualname))
        try:
            return {**whole(name), "called": sorted(called)}
        finally:
            sys.setprofile(None)

    for name in running.ON_A_PAGE:
        began = time.monotonic()
        bases[name] = forked(lambda name=name: traced(name))
        longest[name] = AT_LEAST + SLOWER * (time.monotonic() - began)
        for function in bases[name]["called"]:
            callers.setdefault(function, []).append(name)
    for node, qualname in functions(ast.parse(text)):
        owner = module
        for part in qualname.split(".")[:-1]:
            owner = getattr(owner, part)
        held = vars(owner)[qualname.split(".")[-1]]
        target = getattr(held, "fget", None) or getattr(held, "__func__", None) or getattr(held, "func", None) or held
        target = getattr(target, "__wrapped__", target)
        node.args = ast.arguments([], [], None, [], [], None, [])  # defaults stay as they are
        for n, site in enumerate(sites(node) if callers.get(qualname) else []):
            changed = ast.parse(text)
            function = next(f for f, q in functions(changed) if q == qualname)
            keep, function.args = function.args, ast.arguments([], [], None, [], [], None, [])
            words = mutate(sites(function)[n])
            function.args = keep
            code = code_of(compile(ast.fix_missing_locations(changed), path, "exec"), qualname)

            def run(name: str, target=target, code=code) -> dict:
                target.__code__ = code
                return whole(name)

            best = None
            for name in callers[qualname]:
                got = forked(lambda name=name, run=run: run(name), longest[name])
                if got is None or got["red"]:
                    best = None
                    break
                changed_here = sum(got["answers"].get(q) != v for q, v in bases[name]["answers"].items())
                rank = 2 if changed_here else int(got["text"] != bases[name]["text"])
                if best is None or rank > best[0]:
                    best = (rank, name, got)
            name, got = best[1:] if best else (callers[qualname][0], None)
            judge(f"{qualname} by {name}", site.lineno, words, got, bases[name], tally)


def main(targets: list[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tally = dict.fromkeys(("red", "answer", "text", "nothing"), 0)
    for target in targets or running.ON_A_PAGE:
        if not (pid := os.fork()):  # a process of its own: what a chapter imports and sets stays there
            mine = dict.fromkeys(tally, 0)
            (mutate_library if target.endswith(".py") else mutate_chapter)(target, mine)
            print(f"{target}: {', '.join(f'{count} {kind}' for kind, count in mine.items())}", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    if "--help" in OPTIONS:
        sys.exit(Parser(description=__doc__).print_help())
    sys.exit(main([word for word in sys.argv[1:] if word not in OPTIONS]))
