"""`python -m scaling.train verify RUN`: compares each file of a run's checkpoints with its checksum.

Loading a step checks that each file that a rank reads belongs to the step, and compares the checksums of blocks that it
reads whole. Two kinds of damage are not found there: on another mesh ranks may read parts of blocks, which no checksum
covers, and a disk can lose data that nobody reads for months.
"""

from pathlib import Path

from scaling.common.console import Parser, complaining
from scaling.train import checkpoint, dcp
from scaling.train.durable import named, step_name


def damaged(folder: Path, step: int) -> list[str]:
    """Return a line for each damaged file of a step.

    Raises:
        FileNotFoundError: There is no such step.
    """
    if step not in named(folder):
        raise FileNotFoundError(f"{folder / step_name(step)}: there is no such step\n  fix: name one that is there")
    path = folder / step_name(step)
    try:
        sums = checkpoint.index(folder, step).get("files", dcp.NO_SUMS)
        leaves = dcp.saved_leaves(path, sums)
    except (ValueError, FileNotFoundError) as error:
        return [str(error).splitlines()[0]]
    found = []
    for name, saved in leaves.items():
        read = dcp.ShardReader(path, verified=True, sums=sums)  # one per leaf, because it keeps the blocks that it read
        for block in saved.blocks:
            try:
                read(name, saved, block, True)
            except ValueError as error:
                found.append(str(error).splitlines()[0])
    return found


@complaining(OSError, code=2)
def main(argv=None) -> int:
    """Run the command; return 1 if a checkpoint is damaged."""
    parser = Parser(prog="python -m scaling.train verify", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--step", type=int, help="this checkpoint alone (default: all)")
    args = parser.parse_args(argv)
    if not (steps := named(args.run) if args.step is None else [args.step]):
        checkpoint.latest(args.run)  # raises
    found = {step: damaged(args.run, step) for step in steps}
    for step, lines in found.items():
        print(f"step {step}: " + ("\n  ".join(["damaged", *lines]) if lines else "whole"))
    return int(any(found.values()))
