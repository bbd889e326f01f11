"""The types of every line of a program, by running it: `python -m scaling.check FILE...` (directories too).

Each file that has typed lines is run once: what it hands to ranks runs on an abstract mesh instead, where nothing is
sent; what it prints or waits for does not happen. A line that breaks a rule by itself is reported; an operand that does
not hold what its line says; partial sums that are added to whole arrays, go through a nonlinear function, or are never
reduced; a collective that is never waited for; a result that is not what SPECS or a docstring says. Derivatives are
judged as they run. What could not be judged is named: a call that the run did not reach, an op that is not in the
table, a value that decides.

A strategy is SPECS, a dict of types, {"In": "In[B_X, D]", "W": "W[D, F]", "Out": "Out[B_X, F]"}, with functions given
to Strategy(SPECS, forward, backward, ...), or called forward and backward. A docstring that begins with types,
x[B_X, D] -> Out[B, D], says those of any function; a comment that does, u = fetch(a)  # u[B, D] {U_X}, that
of a variable. docs/rules.md names every rule.
"""

import json
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import scaling
from scaling.check.lines import Finding, check_lines, silent_lines
from scaling.console import Parser

OWN = Path(scaling.__file__).parent


@dataclass
class Report:
    """What was found in some files: faults; how many typed calls there are; and what was not judged, where and why."""

    findings: list[Finding] = field(default_factory=list)
    checked: int = 0
    files: int = 0
    unjudged: list[tuple[str, int, str]] = field(default_factory=list)


def check_files(paths: Sequence, lines_only: bool = False) -> Report:
    """The faults of some files: of their lines, and of what they do when they run."""
    report, texts, calls = Report(files=len(paths)), {}, {}
    for path in map(str, paths):
        try:
            with tokenize.open(path) as file:
                texts[path] = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            report.findings.append(Finding(path, 1, f"cannot be read: {error}", "python"))
            continue
        found, calls[path] = check_lines(texts[path], path)
        report.findings += found
    report.checked = sum(map(len, calls.values()))
    if not lines_only:
        _judge(report, texts, calls, {path for path in texts if OWN in Path(path).resolve().parents})
    report.findings.sort()
    return report


def check_source(text: str, file: str = "<source>") -> list[Finding]:
    """The faults of one text, by its lines and by running it."""
    found, calls = check_lines(text, file)
    report = Report(list(found))
    if calls and not any(finding.rule == "python" for finding in found):
        _judge(report, {file: text}, {file: calls}, set())
    return sorted(report.findings)


def judging() -> bool:
    """Whether the judge runs this program."""
    watch = sys.modules.get("scaling.collectives.watch")
    return watch is not None and watch.who_watches() is not None


def check_script(path: str) -> list[Finding]:
    """The same of a script, before it starts."""
    return check_source(Path(path).read_text(encoding="utf-8"), path)


def _judge(report: Report, texts: dict[str, str], calls: dict[str, list], own: "set[str]") -> None:
    """`own`: the files of the library, which is judged by its own programs."""
    from scaling.check.library import judge_library
    from scaling.check.run import judge_file

    reached: set = set()
    if any(calls.get(path) for path in own):  # first: modules tell their types if they are imported then
        _add(report, judge_library(), reached, texts)
    for path in texts:
        if path not in own and calls.get(path):
            _add(report, judge_file(path, texts[path]), reached, {path: texts[path]})
    lines = {line for _, line in reached if isinstance(line, str)}
    for path, places in calls.items():
        at = {line for file, line in reached if _same(file, path)}
        source = texts[path].splitlines()
        for first, last in places:
            written = " ".join(source[first - 1 : last])
            if (
                not at & set(range(first, last + 1))
                and not any(line in written for line in lines)
                and not any(f.file == path for f in report.findings)
            ):
                report.unjudged.append((path, first, "this call was not reached"))


def _from_here(file: str) -> str:
    """A path as it is written from the working directory, if it lies in it."""
    return str(Path(file).relative_to(Path.cwd())) if file and Path(file).is_relative_to(Path.cwd()) else file


def _same(one: str, other: str) -> bool:
    return one == other or str(Path(one).resolve()) == str(Path(other).resolve())


def _add(report: Report, judged, reached: set, texts: dict[str, str]) -> None:
    reached |= judged.reached
    for fault in judged.findings:
        file, _, line = fault.place.rpartition(":")
        shown = next((path for path in texts if _same(path, file)), file)
        number = int(line or 1)
        silent = silent_lines(texts[shown]).get(number, ()) if shown in texts else ()
        if shown in texts and fault.rule not in silent:
            report.findings.append(Finding(shown, number, fault.message, fault.rule))
    for place, why in judged.unjudged:
        file, _, line = place.rpartition(":")
        shown = next((path for path in texts if file and _same(path, file)), _from_here(file) or place)
        report.unjudged.append((shown, int(line) if line.isdigit() else 1, why))


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


def _summary(report: Report, lines_only: bool) -> str:
    """What was judged, in one line, and what was not, a line each."""
    text = f"{_counted(report.checked, 'call')} in {_counted(report.files, 'file')}"
    text += ", each line by itself" if lines_only else f", {len(report.unjudged)} places not judged"
    lines = [f"  {file}:{line}: {why}" for file, line, why in sorted(set(report.unjudged))]
    return "\n".join([text, *lines, _counted(len(report.findings), "finding")])


def main(argv: "list[str] | None" = None) -> int:
    about, *more = (__doc__ or "").strip().split("\n\n")
    status = "Exit status: 0, nothing was found; 1, something was; 2, an argument cannot be checked."
    parser = Parser(prog="python -m scaling.check", description=about, epilog="\n\n".join([*more, status]))
    parser.add_argument("files", nargs="+", help="Python files, or directories of them")
    parser.add_argument("--lines", action="store_true", help="each literal line by itself; nothing is run")
    parser.add_argument("--strict", action="store_true", help="what is not judged counts as a finding")
    parser.add_argument("--json", action="store_true", help="print findings and what was judged as JSON")
    args = parser.parse_args(argv)
    try:
        files = files_of(args.files)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    report = check_files(files, args.lines)
    if args.json:
        unjudged = [{"file": file, "line": line, "why": why} for file, line, why in report.unjudged]
        found = {"findings": [asdict(finding) for finding in report.findings], "checked": report.checked}
        print(json.dumps(found | {"files": report.files, "unjudged": unjudged}, indent=1))
    for finding in () if args.json else report.findings:
        print(finding)
    print(_summary(report, args.lines), file=sys.stderr)
    return 1 if report.findings or (args.strict and report.unjudged) else 0
