"""Peak memory of a step under ZeRO 0 to 3 on X=4, ours beside PyTorch's: `python tests/benchmarks/memory.py`.

The book's layers with AdamW, as versus_torch.py has them. MB are 10^6 bytes of the fullest rank, beyond what it had
before there was a model; each side runs by itself, on fresh ranks. The closed form is what must be there: params,
gradients, two moments and the activations, whole or a rank's quarter, and of ZeRO 2 and 3 one layer's gradients, of 3
two layers' weights.
"""

from functools import partial

from harness import SIZES, peak_of
from report import show
from versus_torch import BUCKET, FLOAT32, ours, theirs

from scaling import launch
from scaling.common.console import Parser
from scaling.strategies import data_parallel, fsdp, zero

X = 4
SIDES = {  # ours; PyTorch's
    0: (partial(ours, data_parallel, bucket_bytes=BUCKET), "DistributedDataParallel", "data_parallel"),
    1: (partial(ours, zero, stage=1), "ZeroRedundancyOptimizer", "zero"),
    2: (partial(ours, zero, stage=2), "fully_shard, reshard_after_forward=False", "fsdp_kept"),
    3: (partial(ours, fsdp), "fully_shard", "fsdp"),
}


def least(level: int, size) -> int:
    """The closed form, in bytes."""
    moments, grads, params = (1 if level < split else 1 / X for split in (1, 2, 3))
    state = size.params * (params + grads + 2 * moments)
    passing = ((level >= 2) + 2 * (level == 3)) * size.params / size.L
    return int(FLOAT32 * (state + passing + size.L * size.rows / X * (size.D + 2 * size.F)))


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--size", default="default", choices=SIZES)
    size = SIZES[parser.parse_args().size]
    options, rows = {"checked": False, "threads": 1, "timeout": 600}, []
    for level, (mine, rival, name) in SIDES.items():
        peaks = [
            max(launch.run(peak_of, {"X": X}, build, size, "adamw", SIZES["tiny"], **options)) / 1e6
            for build in (mine, partial(theirs, name))
        ]
        rows.append((level, rival, f"{least(level, size) / 1e6:.0f}", *(f"{peak:.0f}" for peak in peaks)))
    print(f"{size}, AdamW, X={X}.\n")
    show(rows, ["ZeRO", "PyTorch's", "closed form MB", "ours", "theirs"], 2)


if __name__ == "__main__":
    main()
