"""Run `python -m scaling.exercise`: list the exercises, write one (new NAME), or judge an answer (check FILE)."""

import sys
from pathlib import Path

from scaling.common.console import Parser, complaining
from scaling.exercise.page import exercises, grade, new


@complaining(ValueError, OSError)
def main(argv: "list[str] | None" = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(
        prog="python -m scaling.exercise", description="Solve exercises on the book's algorithms, which are judged"
    )
    commands = parser.add_subparsers(dest="command")
    fresh = commands.add_parser("new", help="write a file with the question and blanks")
    fresh.add_argument("name", help="as the list has it")
    fresh.add_argument("--out", metavar="FILE", help="where to (default NAME.py)")
    judged = commands.add_parser("check", help="judge an answer: types, results and gradients, bytes")
    judged.add_argument("file", help="a file that `new` wrote, filled in")
    args = parser.parse_args(argv)
    if args.command == "new":
        text, file = new(args.name), Path(args.out or f"{args.name}.py")
        if file.exists():
            raise ValueError(f"{file} is there already\n  fix: give another file with --out, or remove it")
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}: fill in what is ..., then python -m scaling.exercise check {file}")
        return 0
    if args.command == "check":
        verdict = grade(Path(args.file))
        print(verdict)
        return 0 if verdict.right else 1
    part = 0
    for exercise in exercises().values():
        if exercise.part != part:
            part = exercise.part
            print(f"\nPart {part}")
        print(f"  {exercise.name:28} {exercise.title}")
    print("\npython -m scaling.exercise new NAME writes one to fill in")
    return 0


if __name__ == "__main__":
    sys.exit(main())
