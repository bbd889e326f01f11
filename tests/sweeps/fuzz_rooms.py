"""Random calls of the rooms above the collectives, right and wrong: no wrong number without an error.

    python tests/sweeps/fuzz_rooms.py [--cases 10000] [--seed 0]

Each case draws a call: a loss on one device and on a mesh, a decode step, the engine, sampling, an update, clipping,
attention over a split sequence, experts, masks, ragged rows, a transfer, a program of shard_map, of explicit and of
auto mode, a checkpoint. One of its arguments is spoiled: its shape, dtype, device, range, name, memory. It ends well if
the numbers are those of a reference written out in float64, or if the call raises a ValueError that names the fix;
exits with 1 otherwise. All is done in one process. A test of the suite runs some hundred cases.
"""

import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from misuse.rooms import room
from misuse.tried import report, tried

from scaling.common.console import Parser


def run(cases: int, seed: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong)."""
    return tried(lambda draw, number: room(draw), cases, f"rooms {seed}")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's own, of complex numbers cut off
    outcomes, failures = run(args.cases, args.seed)
    report(outcomes, failures, f"{args.cases} cases")


if __name__ == "__main__":
    main()
