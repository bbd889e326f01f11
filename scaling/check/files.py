"""A static type checker for code in this notation: `python -m scaling.check FILE...` (directories too).

It reads functions without running them and follows the type of every variable from line to line, through loops, tuples,
branches and the module's own helper functions. It reports a line that breaks a rule by itself; an operand that does not
hold what its line says; partial sums that are added to whole arrays, go through a nonlinearity, or are never reduced;
and, in a strategy, a result that is not what SPECS says. Where nothing is known of a variable, its declared type is
trusted from there on. A module's SPECS dict gives the types of the arguments of `forward` and `backward` and of params.
"""

import argparse
import ast
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from scaling.check.statements import Reader


@dataclass(frozen=True, order=True)
class Finding:
    """One fault: where it stands, and what is wrong, with the types and the rule."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def check_source(text: str, filename: str = "<source>") -> list[Finding]:
    """The faults of one module's text, in the order of its lines. SyntaxError if it is no Python."""
    reader = Reader(ast.parse(text, filename))
    reader.read()
    return sorted(Finding(filename, line, message) for line, message in reader.findings)


def check_file(path: "str | Path") -> list[Finding]:
    """The faults of one file."""
    return check_source(Path(path).read_text(encoding="utf-8"), str(path))


def files_of(paths) -> list[Path]:
    """The Python files named, and those in the directories named. ValueError for a path that leads to none."""
    found = []
    for path in map(Path, paths):
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not inside or not path.exists():
            raise ValueError(f"{path}: " + ("no Python files in this directory" if path.is_dir() else "no such file"))
        found += inside
    return found


def main(argv: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scaling.check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", help="Python files, or directories of them")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args, findings = parser.parse_args(argv), []
    try:
        files = files_of(args.files)
    except ValueError as error:
        parser.error(str(error))
    for path in files:
        try:
            findings += check_file(path)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            findings.append(Finding(str(path), getattr(error, "lineno", None) or 0, f"cannot be read: {error}"))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    for finding in () if args.json else findings:
        print(finding)
    print(f"{len(files)} files, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0
