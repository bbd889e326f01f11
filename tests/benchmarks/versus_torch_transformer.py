"""The Transformer of `scaling.strategies.transformer` against PyTorch's own: time of a step, bytes sent, peak memory.

    python tests/benchmarks/versus_torch_transformer.py
    python tests/benchmarks/versus_torch_transformer.py --only tp --sizes tiny --steps 40

Both sides have the same model (RMSNorm, RoPE, grouped queries, SwiGLU, untied), initial values, tokens, float32 and
AdamW, and run in turn on the same four ranks, one thread a rank; a step is forward, loss, backward and update.
PyTorch's is `native.Model`, with its default optimizer and tuned with a fused one. Figures as in versus_torch.py.
"""

from dataclasses import dataclass
from functools import partial

import torch
from harness import RATE, SIDES, Contest, Timed, race
from native import staged_step_of, step_of
from report import options
from versus_torch import report

from scaling import optim, tree
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.strategies.transformer.layer import REMAT

MICROBATCHES = 4


@dataclass(frozen=True)
class Size(Timed):
    """A model, sequences and their tokens."""

    config: Config
    B: int
    T: int

    def __str__(self) -> str:
        c = self.config
        return f"L={c.L} D={c.D} N={c.N} K={c.K} H={c.H} F={c.F} V={c.V}, {self.B} x {self.T} tokens"


LARGE = Config("large", 4, 512, 1408, 8, 4, 64, 4096)
SIZES = {
    "default": Size(LARGE, 8, 256),
    "tiny": Size(LARGE.with_(name="tiny", D=128, H=16, F=384), 8, 64, repeat=3),
}
SMALL = Size(LARGE.with_(name="small", D=32, H=4, F=64, V=64), 8, 16)  # runs first where memory is measured
LAYOUTS = {
    "fsdp": ("fully_shard", {"X": 4}),
    "tp": ("parallelize_module, sequence and loss parallel", {"Y": 4}),
    "fsdp_tp": ("fully_shard + parallelize_module", {"X": 2, "Y": 2}),
    "interleaved": ("ScheduleInterleaved1F1B + fully_shard", {"Z": 2, "X": 2}),
}


def given(mesh, size: Size):
    """(whole params, this rank's tokens and targets)."""
    g = torch.Generator().manual_seed(1)
    both = (torch.randint(size.config.V, (size.B, size.T), generator=g).to(mesh.device) for _ in range(2))
    local = (tree.shard(x, str(present("t[B_X, T]", mesh)), mesh) for x in both)
    return model.init(size.config, 0, size.dtype, mesh.device), *local


def ours(mesh, size: Size, _optimizer: str, remat: str = "none", compiled: bool = False):
    config, (params, tokens, targets) = size.config, given(mesh, size)
    layout = {"schedule": "interleaved"} if "Z" in mesh.sizes else {}
    options = layout | ({"microbatches": MICROBATCHES, "keep_weights": True} if layout else {})  # as theirs keeps them
    params, rule = transformer.shard(params, config, mesh, **layout), optim.adamw(RATE)
    state = rule.init(params)

    def pure(params, state, tokens, targets):
        loss, grads = transformer.loss_and_grads(params, tokens, targets, config, mesh, remat=remat, **options)
        return loss, *rule.update(grads, state, params, donate=True)

    run = torch.compile(pure, fullgraph=True, dynamic=False) if compiled else pure

    def step():
        nonlocal params, state
        loss, params, state = run(params, state, tokens, targets)
        return loss / mesh.size()

    return step


def theirs(mesh, size: Size, _optimizer: str, tuned: bool = False, compiled: bool = False):
    params, tokens, targets = given(mesh, size)
    if "Z" in mesh.sizes:
        return staged_step_of(params, size.config, mesh, tokens, targets, RATE, tuned, MICROBATCHES)
    return step_of(params, size.config, mesh, tokens, targets, RATE, tuned, compiled)


def contests(remat: str) -> dict[str, Contest]:
    mine = partial(ours, remat=remat)
    return {
        name: Contest(name, rival, lambda ranks, axes=axes: axes, mine, theirs, lambda mesh, size: None)
        for name, (rival, axes) in LAYOUTS.items()
    }


def main() -> None:
    parser = options(__doc__, only=LAYOUTS, sizes=SIZES, rivals=SIDES[1:], steps=20, threads=1, json=None)
    parser.add_argument("--remat", default="none", choices=REMAT, help="of ours: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known, results = contests(args.remat), []
    for label in args.sizes:
        for name in args.only:
            row = race(known[name], SIZES[label], "adamw", 4, args.steps, args.threads, args.rivals, small=SMALL)
            results.append({"size": label} | row)
    report(results, args, 4, SIZES)


if __name__ == "__main__":
    main()
