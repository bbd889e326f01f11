"""`python -m scaling.train verify RUN`: compares each file of a run's checkpoints with its checksum.

Loading a step checks the blocks that a rank reads whole. On another mesh ranks read parts, which no sum covers; and a
disk can lose what nobody reads for months.
"""

from pathlib import Path

from scaling.common.console import Parser, complaining
from scaling.train import checkpoint, dcp
from scaling.train.durable import complete, step_name


def damaged(folder: Path, step: int) -> list[str]:
    """What is wrong with the files of a step, a line each. FileNotFoundError if that step is not complete."""
    path = folder / step_name(step)
    try:
        checkpoint.index(folder, step)
        leaves = dcp.saved_leaves(path)
    except ValueError as error:
        return [str(error).splitlines()[0]]
    found = []
    for name, saved in leaves.items():
        read = dcp.ShardReader(path, verified=True)  # it keeps what it has read
        for block in saved.blocks:
            try:
                read(name, saved, block, True)
            except ValueError as error:
                found.append(str(error).splitlines()[0])
    return found


@complaining(OSError, code=2)
def main(argv=None) -> int:
    parser = Parser(prog="python -m scaling.train verify", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--step", type=int, help="this checkpoint alone (default: all that are complete)")
    args = parser.parse_args(argv)
    checkpoint.latest(args.run)  # raises if there is none
    steps = complete(args.run) if args.step is None else [args.step]
    found = {step: damaged(args.run, step) for step in steps}
    for step, lines in found.items():
        print(f"step {step}: " + ("\n  ".join(["damaged", *lines]) if lines else "whole"))
    return int(any(found.values()))
