"""A static type checker for code in this notation: `python -m scaling.check FILE...` (directories too).

It reads functions without running them and follows the type of every variable from line to line, through loops, tuples,
branches and helper functions, its module's and those of modules that it imports. It reports a line that breaks a rule
by itself; an operand that does not hold what its line says; partial sums that are added to whole arrays, go through a
nonlinear function, or are never reduced; what is used before it has been waited for or after it was donated; and, in
a strategy, a result that is not what SPECS says. Where nothing is known of a variable, its declared type is trusted
from there on.

A strategy is SPECS, a dict of types, {"In": "In[B_X, D]", "W": "W[D, F]", "Out": "Out[B_X, F]"}, with functions given
to Strategy(SPECS, forward, backward, ...), or called forward and backward: their arguments are known by their names
(params, saved, In, W, dOut), and what they return is compared with SPECS. A docstring that begins with types, x[B_X, D]
-> Out[B, D], says those of any function; a comment that does, u = fetch(a)  # u[B, D] {U_X}, that of a variable.
docs/rules.md names every rule.
"""

import gc
import io
import json
import multiprocessing
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scaling.check.modules import Module, Modules, module_name
from scaling.check.reader import Reader
from scaling.check.rules import RULES, said
from scaling.console import Parser

FILES = 50  # that a process of its own is worth
IGNORE = re.compile(r"#\s*scaling:\s*ignore\b(?:\[([^\]]*)\])?")


@dataclass(frozen=True, order=True)
class Finding:
    """One fault: where it stands, and what is wrong, with the types and the rule; `rule` is its name."""

    file: str
    line: int
    message: str
    rule: str = ""

    def __str__(self) -> str:
        first, *rest = self.message.split("\n")
        return "\n".join([f"{self.file}:{self.line}: {first}", *rest]) + f"  [{self.rule}]"


@dataclass
class Report:
    """What was found in some files: faults; how many typed calls were checked; which of them could not be read, and
    why; and notes."""

    findings: list[Finding] = field(default_factory=list)
    checked: int = 0
    files: int = 0
    unreadable: list[tuple[str, int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        self.findings += other.findings
        self.checked, self.files = self.checked + other.checked, self.files + other.files
        self.unreadable, self.notes = self.unreadable + other.unreadable, self.notes + other.notes


def check_source(text: str, filename: str = "<source>", modules: Modules | None = None) -> list[Finding]:
    """The faults of one module's text, in the order of its lines. SyntaxError if it is no Python."""
    return read_source(text, filename, modules).findings


def read_source(text: str, filename: str = "<source>", modules: Modules | None = None) -> Report:
    """The same with what was checked and what could not be read. `modules`: those that were found before."""
    path, modules = Path(filename), modules or Modules()
    known = path.suffix == ".py" and path.exists()
    held = modules.load(module_name(path), path) if known else None
    module = held if held is not None and held.text == text else None
    if module is None:
        module = Module(module_name(path) if known else path.stem, path if known else None, text)
    report = Report(files=1)
    if "scaling" not in text:
        return report
    reader = Reader(module, modules)
    reader.read()
    report.notes = [f"{filename}: {note}" for note in reader.notes]
    comments = ignored(text)
    for fault in sorted(reader.faults):
        if not any(fault.rule in comments.get(line, ()) for line in range(fault.line, fault.last + 1)):
            report.findings.append(Finding(filename, fault.line, fault.message, fault.rule))
    for line, names in comments.items():
        if unknown := [name for name in names if name not in RULES]:
            what = f"nothing is ignored by {unknown[0]!r}" if unknown[0] else "nothing is ignored"
            message = said(what, "ignore", f"name one of the rules: {', '.join(RULES)}")
            report.findings.append(Finding(filename, line, message, "ignore"))
    report.findings.sort()
    own = [(node, why) for node, (where, why) in reader.seen.items() if where is module]
    report.checked = sum(1 for _, why in own if not why)
    report.unreadable = sorted((filename, node.lineno, why) for node, why in own if why)
    return report


def ignored(text: str) -> dict[int, list[str]]:
    """{line: the rules that a comment there silences}; [""] for a comment that names none."""
    if not IGNORE.search(text):
        return {}
    found: dict[int, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := IGNORE.search(token.string)):
            found[token.start[0]] = [name.strip() for name in (match[1] or "").split(",")]
    return found


def check_file(path: "str | Path", modules: Modules | None = None) -> list[Finding]:
    """The faults of one file."""
    return read_file(path, modules).findings


def read_file(path: "str | Path", modules: Modules | None = None) -> Report:
    """The same with what was checked. A file that cannot be read is a finding."""
    try:
        with tokenize.open(path) as file:
            return read_source(file.read(), str(path), modules)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None) or 1
        return Report([Finding(str(path), line, f"cannot be read: {error}", "python")], files=1)


def read_files(paths: Sequence) -> Report:
    """The same of many files, each module parsed once."""
    with _garbage_kept():
        return of_all(_read_each(paths))


def read_in_processes(paths: Sequence) -> Report:
    """The same on all cores, where there are so many files that starting processes is worth it."""
    workers = min(os.cpu_count() or 1, len(paths) // FILES)
    if workers < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return read_files(paths)
    with _garbage_kept():
        found = _read_by_turns(paths, workers)
    return of_all([found[number] for number in range(len(paths))])


def _read_each(paths: Sequence) -> list[Report]:
    modules = Modules()
    return [read_file(path, modules) for path in paths]


def _read_by_turns(paths: Sequence, workers: int) -> dict[int, Report]:
    """{number of a file: its report}. The processes are forked when all files are parsed, and have the syntax trees
    from here."""
    fork, modules, found = multiprocessing.get_context("fork"), Modules(), {}
    for path in map(Path, paths):
        modules.load(module_name(path), path)
    turn, ends = fork.SimpleQueue(), []
    for _ in range(workers):
        end, other = fork.Pipe(duplex=False)
        fork.Process(target=_take_turns, args=(paths, modules, turn, other), daemon=True).start()
        other.close()
        ends.append(end)
    turn.put(0)
    del modules  # they read meanwhile
    for end in ends:
        found |= end.recv()
    return found


def _take_turns(paths: Sequence, modules: Modules, turn, end) -> None:
    """Read the next file until none is left; `turn` holds its number."""
    found = {}
    while (number := turn.get()) < len(paths):
        turn.put(number + 1)
        found[number] = read_file(paths[number], modules)
    turn.put(number)
    end.send(found)


def of_all(reports: Sequence[Report]) -> Report:
    whole = Report()
    for each in reports:
        whole.add(each)
    return whole


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Garbage is not collected meanwhile: a syntax tree is none before the end, and looking for some in those of
    hundreds of modules is half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def files_of(paths: Sequence) -> list[Path]:
    """The Python files named, and those in the directories named. ValueError for a path that leads to none."""
    found = []
    for path in map(Path, paths):
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not inside or not path.exists():
            raise ValueError(
                f"{path}: "
                + ("no Python files in this directory" if path.is_dir() else "no such file")
                + "\n  fix: give .py files, or directories that hold some"
            )
        if path.is_file() and not is_python(path):
            raise ValueError(f"{path}: is not a Python file\n  fix: give .py files, or directories that hold some")
        found += inside
    return list(dict.fromkeys(found))


def is_python(path: Path) -> bool:
    """Whether a file is called .py, or is a script that names Python in its first line."""
    if path.suffix in (".py", ".pyi"):
        return True
    with path.open("rb") as file:
        first = file.readline(200)
    return not path.suffix and first.startswith(b"#!") and b"python" in first


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _summary(report: Report) -> str:
    """What was checked, in one line, and what could not be read, a line each."""
    text = f"{_counted(report.checked, 'call')} in {_counted(report.files, 'file')} checked, "
    text += f"{len(report.unreadable)} not readable" + (":" if report.unreadable else "")
    lines = [f"  {file}:{line}: {why}" for file, line, why in report.unreadable]
    return "\n".join([text, *lines, *report.notes, _counted(len(report.findings), "finding")])


def main(argv: "list[str] | None" = None) -> int:
    about, *more = (__doc__ or "").strip().split("\n\n")
    status = "Exit status: 0, nothing was found; 1, something was; 2, an argument cannot be checked."
    parser = Parser(prog="python -m scaling.check", description=about, epilog="\n\n".join([*more, status]))
    parser.add_argument("files", nargs="+", help="Python files, or directories of them")
    parser.add_argument("--json", action="store_true", help="print findings and what was checked as JSON")
    args = parser.parse_args(argv)
    try:
        files = files_of(args.files)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    report = read_in_processes(files)
    if args.json:
        unreadable = [{"file": file, "line": line, "why": why} for file, line, why in report.unreadable]
        found = {"findings": [asdict(finding) for finding in report.findings], "checked": report.checked}
        print(json.dumps(found | {"files": report.files, "unreadable": unreadable, "notes": report.notes}, indent=1))
    for finding in () if args.json else report.findings:
        print(finding)
    print(_summary(report), file=sys.stderr)
    return 1 if report.findings else 0
