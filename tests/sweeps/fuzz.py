"""Random calls and commands, right and wrong: no wrong number without an error, no error without its fix.

    python tests/sweeps/fuzz.py calls [--cases 10000] [--seed 0] [--mesh X=2,Y=2]    collectives and products
    python tests/sweeps/fuzz.py rooms [--cases 10000] [--seed 0]                     the rooms above them
    python tests/sweeps/fuzz.py ranks [--cases 3000] [--mesh X=2,Y=2]    one rank does another thing
    python tests/sweeps/fuzz.py alone [--cases 150] [--mesh X=2,Y=2]     and each case is a run by itself
    python tests/sweeps/fuzz.py deaths [--cases 1000] [--mesh X=2,Y=2] [--limit 0.5]    one dies, and it is known soon
    python tests/sweeps/fuzz.py commands [--cases 2500] [--only train,show] [--each]    the command line

What is drawn, and when a case ends well, stands in misuse/typed.py, rooms.py, ranks.py and commands.py.
Exits with 1 if a case does not.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from misuse import commands, ranks, rooms, typed

from scaling import launch
from scaling.common.console import Parser, integer
from scaling.spec.sizes import parse_mesh


def on_all(args) -> tuple[Counter, list[str]]:
    results = launch.run(typed.run, args.mesh, args.cases, args.seed)
    return results[0][0], sorted({text for _, found in results for text in found})


WHAT = {  # (cases, run)
    "calls": (10_000, on_all),
    "rooms": (10_000, lambda args: rooms.spoiled("", args.cases, args.seed)),
    "ranks": (3000, lambda args: ranks.sweep(args.mesh, args.cases, args.seed)),
    "alone": (150, lambda args: ranks.alone("alone", args.mesh, args.cases, args.seed, args.limit)),
    "deaths": (1000, lambda args: ranks.alone("deaths", args.mesh, args.cases, args.seed, args.limit)),
    "commands": (2500, lambda args: commands.run(args.cases, args.seed, args.only, args.each)),
}


def main() -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = Parser(description=about, epilog=more)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--cases", type=integer(1), help="about how many")
    parser.add_argument("--seed", type=integer(), default=0, help="of what is drawn (default 0)")
    parser.add_argument("--mesh", default="X=2,Y=2", help="of calls, ranks, alone and deaths (default X=2,Y=2)")
    parser.add_argument("--limit", type=float, default=0.5, help="seconds until a death is known (default 0.5)")
    parser.add_argument("--only", default="", help="commands and chapters that begin with one of these, by commas")
    parser.add_argument("--each", action="store_true", help="one case for each option alone, instead of draws")
    args = parser.parse_args()
    cases, run = WHAT[args.what]
    args.cases, args.mesh = args.cases or cases, parse_mesh(args.mesh)
    outcomes, failures = run(args)
    for outcome, count in outcomes.most_common():
        print(f"{count:8}  {outcome}")
    for text in failures[:20]:
        print("\n" + text)
    print(f"\n{outcomes.total()} cases of {args.what}: {len(failures)} wrong")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
