"""Peak memory of a step under ZeRO 0 to 3 on X=4, ours beside PyTorch's: `python tests/benchmarks/memory.py`.

The book's layers with AdamW, as versus_torch.py has them. MB are 10^6 bytes of the fullest rank, beyond what it had
before there was a model; each side runs by itself, on fresh ranks. The closed form is what must be there: params,
gradients, two moments and the activations, whole or a rank's quarter, and of ZeRO 2 and 3 one layer's gradients, of 3
two layers' weights.
"""

from functools import partial

from harness import SIZES, Contest, peak
from report import options, show
from versus_torch import BUCKET, FLOAT32, ours, theirs

from scaling.strategies import data_parallel, fsdp, zero

X = 4
SIDES = (  # ours; PyTorch's
    (partial(ours, data_parallel, bucket_bytes=BUCKET), "DistributedDataParallel", "data_parallel"),
    (partial(ours, zero, stage=1), "ZeroRedundancyOptimizer", "zero"),
    (partial(ours, zero, stage=2), "fully_shard, reshard_after_forward=False", "fsdp_kept"),
    (partial(ours, fsdp), "fully_shard", "fsdp"),
)


def least(level: int, size) -> float:
    """The closed form, in MB."""
    moments, grads, params = (1 if level < split else 1 / X for split in (1, 2, 3))
    state = size.params * (params + grads + 2 * moments)
    passing = ((level >= 2) + 2 * (level == 3)) * size.params / size.L
    return FLOAT32 * (state + passing + size.L * size.rows / X * (size.D + 2 * size.F)) / 1e6


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--size", default="default", choices=SIZES)
    size, rows = SIZES[parser.parse_args().size], []
    for level, (mine, rival, name) in enumerate(SIDES):
        contest = Contest(name, rival, "X", mine, partial(theirs, name))
        peaks = [peak(contest, side, size, "adamw", X, SIZES["tiny"]) for side in ("ours", "theirs")]
        rows.append([level, rival, *(f"{MB:.0f}" for MB in (least(level, size), *peaks))])
    print(f"{size}, AdamW, X={X}.\n")
    show(rows, ["ZeRO", "PyTorch's", "closed form, MB", "ours, MB", "theirs, MB"], 2)
