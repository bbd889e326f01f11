"""Change one thing at random in the library or in a chapter: a test must fail. Not part of the suite.

    python tests/sweeps/mutate.py --out mutants.jsonl --count 200 --seed 0     goes on where it stopped
    python tests/sweeps/mutate.py --out mutants.jsonl --report                 what no test noticed
    python tests/sweeps/mutate.py --out answers.jsonl --only chapters/01_roofline.py    under its answers and checks

A mutant turns a comparison around, swaps an operator, `and` with `or`, True with False or the two arguments of a call,
adds 1 to a number, negates a condition, or drops a statement. It runs in a copy of the repository, under the tests that
cover its room: those named as its file first, the quick ones before the slow ones, sweeps last; of a chapter and of
what answers are computed by, the chapters' verdicts, checks and pinned values. Texts of errors, annotations, what is
only shown and zip's `strict` are left as they are. Which mutants are drawn hangs on the seed and on their own text
alone, so a change elsewhere leaves the draw as it is; chapters are drawn if `--only` names them.

A mutant is killed if a test fails. One test that takes PROCESSOR seconds of processor time ("loops"), or none for
IDLE seconds ("hangs"), is stopped: the report counts such mutants apart and lists them, as no test failed. Neither
limit hangs on what else the machine does.

Some change no number, and no test can notice them, as they only take longer, say. `equivalent.toml` beside this file
has those that were found, each with its reason; the report leaves them out.
"""

import ast
import contextlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # at the end: tests of a copy find what is in the copy

from sources import replaced

from scaling.common.console import Parser

ROOT = Path(__file__).parents[2]
ALIKE = ("max", "min", "add", "promote_types")  # take their two arguments alike
PROCESSOR, IDLE = 150.0, 150.0  # seconds that one test may take, and that it may wait
BYTES = 16 * 2**30  # of memory, for all tests of a mutant
TESTS = tomllib.loads(Path(__file__).with_name("rooms.toml").read_text(encoding="utf-8"))  # the longest prefix counts
SHOWN = ("Page", "say", "title", "chart", "picture")  # calls of a chapter that hold nothing
SWAPS: dict[type, type] = {ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
SWAPS |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
SWAPS |= {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
SWAPS |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And}


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may be changed: no annotation, no text of an error, nothing that a chapter only shows."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SHOWN:
        return
    yield node
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg"):
            continue
        for each in child if isinstance(child, list) else [child]:
            strict = isinstance(each, ast.keyword) and each.arg == "strict"
            if isinstance(each, ast.AST) and not isinstance(each, (ast.Raise, ast.JoinedStr)) and not strict:
                yield from parts(each)


def edits(node: ast.AST) -> Iterator[str]:
    """The source that may stand in the place of a node."""
    match node:
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.BinOp(op=op) if type(op) in SWAPS:
            yield ast.unparse(ast.BinOp(node.left, SWAPS[type(op)](), node.right))
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield ast.unparse(ast.Compare(node.left, [SWAPS[type(op)]()], node.comparators))
        case ast.BoolOp(op=op):
            yield ast.unparse(ast.BoolOp(SWAPS[type(op)](), node.values))
        case ast.UnaryOp(op=ast.Not()):
            yield ast.unparse(node.operand)
        case ast.IfExp():
            yield ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
        case ast.Call(func=func) if ast.unparse(func).rpartition(".")[2] in ALIKE:
            return
        case ast.Call(args=[a, b]) if ast.unparse(a) != ast.unparse(b):
            yield ast.unparse(ast.Call(node.func, [b, a], node.keywords))
        case ast.AugAssign(target=ast.Name(id="__all__")):
            return
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"


def sites(text: str) -> list[tuple[ast.AST, str]]:
    """(node, what may stand in its place) of a module."""
    found = []
    for node in parts(ast.parse(text)):
        for edit in edits(node):
            found.append((node, edit if isinstance(node, ast.stmt) else f"({edit})"))
        if isinstance(node, (ast.If, ast.While)):
            found.append((node.test, f"(not ({ast.unparse(node.test)}))"))
    return found


def shown(text: str, node: ast.AST, edit: str) -> dict[str, str]:
    """The lines that a mutant changes, as they were and as they are, without line breaks."""
    lines, changed = text.splitlines(), replaced(text, node, edit).splitlines()
    after = node.end_lineno + len(changed) - len(lines)
    parts = {"before": lines[node.lineno - 1 : node.end_lineno], "after": changed[node.lineno - 1 : after]}
    return {name: " ".join(" ".join(some).split()) for name, some in parts.items()}


def tests_of(file: str) -> list[str]:
    """The tests that cover a file: of the library, those named as it is first."""
    if file.startswith("chapters/"):
        return [f"tests/book/test_chapters.py::test_answers_and_what_is_printed[{Path(file).stem}]"]
    rooms = [room for room in TESTS if file.removeprefix("scaling/").startswith(room)]
    tests = [f"tests/{name}" for name in TESTS[max(rooms, key=len)]]
    named = (ROOT / "tests").rglob(f"test_*{Path(file).stem.removeprefix('_')}*.py")
    first = [str(path.relative_to(ROOT)) for path in named]
    return [path for path in first if path.startswith(tuple(tests))] + tests


def mutants(seed: int, only: list[str]) -> Iterator[tuple[str, ast.AST, str, str]]:
    """(file, node, edit, the file's text with the edit), in a random order."""
    files = [path for room in TESTS for path in [*(ROOT / "scaling" / room).rglob("*.py")] or [ROOT / "scaling" / room]]
    files += [path for path in (ROOT / "chapters").glob("*.py") if str(path.relative_to(ROOT)).startswith(tuple(only))]
    found = []
    for path in dict.fromkeys(sorted(files)):
        text, file, seen = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)), Counter()
        for node, edit in sites(text):
            said = f"{seed} {file} {ast.unparse(node)} {edit}"
            seen[said] += 1
            found.append((blake2b(f"{said} {seen[said]}".encode()).digest(), file, node, edit, text))
    for _, file, node, edit, text in sorted(found, key=lambda each: each[0]):
        yield file, node, edit, replaced(text, node, edit)


def spent(session: int) -> float:
    """Seconds of processor time that the processes of a session took, with those that they waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # from the state on, the third of proc(5)
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def stopped(process: multiprocessing.process.BaseProcess, log: Path) -> str:
    """ "loops" or "hangs" if one test of a process took too long, "" once it ended."""
    size, began = -1, 0.0  # of the log, which grows as each test ends
    used, since = 0.0, time.monotonic()
    while process.exitcode is None:
        process.join(0.5)
        now, grown = spent(process.pid or 0), log.stat().st_size if log.exists() else 0
        if grown != size:
            size, began = grown, now
        if now > used + 1:
            used, since = now, time.monotonic()
        if now > began + PROCESSOR or time.monotonic() > since + IDLE:
            return "loops" if now > began + PROCESSOR else "hangs"
    return ""


def run(folder: Path, tests: list[str], marker: str) -> str:
    """The first test that fails, "loops", "hangs", or "" if all pass. They run in a process forked from this one."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(folder, tests, marker, log))
    process.start()
    late = stopped(process, log)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    if late or process.exitcode in (0, 5):  # 5: no test has this marker
        return late
    said = log.read_text()
    if process.exitcode == 3 or "ERROR: file or directory not found" in said:  # which says nothing of the mutant
        sys.exit(said)
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"exit {process.exitcode}"


def _run(folder: Path, tests: list[str], marker: str, log: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a program in the background would ignore
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    sys.path[0] = str(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "scaling"]:
        del sys.modules[name]  # imported for this script, from another folder
    sys.argv = ["pytest"]
    code = pytest.main(["-x", "-q", "-m", marker, *tests])
    sys.stdout.flush()
    os._exit(code)


def tried(folder: Path, file: str, text: str, tests: list[str], *markers: str) -> str:
    """The first test that fails, as `run`, while a file holds this text."""
    original = (folder / file).read_text(encoding="utf-8")
    (folder / file).write_text(text, encoding="utf-8")
    found = next(filter(None, (run(folder, tests, marker) for marker in markers)), "")
    (folder / file).write_text(original, encoding="utf-8")
    return found


def report(rows: list[dict]) -> None:
    equivalent = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text(encoding="utf-8"))["mutant"]
    known = {(each["file"], each["before"], each["after"]) for each in equivalent}
    every, apart = len(rows), {"survived": "", "looped": "loops", "hung": "hangs"}
    rows = [row for row in rows if row["noticed"] or (row["file"], row["before"], row["after"]) not in known]
    counts = Counter()
    for word, noticed in apart.items():
        for row in rows:
            if row["noticed"] == noticed:
                counts[word] += 1
                print(f"{word}: {row['file']}:{row['line']}: {row['before']}  ->  {row['after']}")
    killed = len(rows) - counts.total()
    print(
        f"{killed} of {len(rows)} mutants killed by a failing test, {killed / max(len(rows), 1):.1%} "
        f"({every - len(rows)} more are equivalent); " + ", ".join(f"{counts[word]} {word}" for word in apart)
    )


def main() -> None:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = Parser(description=about, epilog=more)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], metavar="FILE", help="or folder, as in scaling/mesh")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one a mutant")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args()
    rows = [*map(json.loads, args.out.read_text().splitlines() if args.out.exists() else ())]
    if not args.report:
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("torch._dynamo", "numpy", "optree"):
            importlib.import_module(name)  # once, for all that is forked
        done = {(row["file"], row["line"], row["before"], row["after"]) for row in rows}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "copy"
            os.environ["PYTHONPATH"] = str(folder)
            sys.dont_write_bytecode = True
            shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
            if wrong := run(folder, ["tests/spec/test_spec.py"], ""):
                sys.exit(f"without any change: {wrong}\n{(folder / 'log').read_text()}")
            if not tried(folder, "scaling/spec/types.py", "", ["tests/spec/test_spec.py"], ""):
                sys.exit("an empty module goes unnoticed: it is not the copy that is tested")
            for file, node, edit, text in mutants(args.seed, [name for name in args.only if name]):
                if len(rows) >= args.count:
                    break
                original = (folder / file).read_text(encoding="utf-8")
                row = {"file": file, "line": node.lineno} | shown(original, node, edit)
                if tuple(row.values()) in done or not file.startswith(tuple(args.only)):
                    continue
                slow = "slow" if "compil" in original else "slow and not compile"
                markers = "not slow", slow, "chapter", slow.replace("slow", "sweep")
                row["noticed"] = tried(folder, file, text, tests_of(file), *markers)
                rows.append(row)
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    report(rows)


if __name__ == "__main__":
    main()
