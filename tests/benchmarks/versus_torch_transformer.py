"""The Transformer of `scaling.strategies.transformer` against PyTorch's own: time of a step, bytes sent, peak memory.

    python tests/benchmarks/versus_torch_transformer.py
    python tests/benchmarks/versus_torch_transformer.py --only tp --sizes tiny --steps 40

Both sides have the same model (RMSNorm, RoPE, grouped queries, SwiGLU, untied), initial values, tokens, float32 and
AdamW, and run in turn on the same four ranks, one thread a rank; a step is forward, loss, backward and update.
PyTorch's is `native.Model`, with its default optimizer and tuned with a fused one. Figures as in versus_torch.py.
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import native
import torch
import torch.nn.functional as F
from harness import RATE, Contest, Timed, compete, stepping
from torch.distributed.tensor.parallel import loss_parallel

from scaling import optim, tree
from scaling.configs import Config
from scaling.cost.transformer import train_flops
from scaling.models import transformer as model
from scaling.spec import present
from scaling.strategies import transformer

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

    @property
    def L(self) -> int:
        return self.config.L

    @property
    def flops(self) -> float:
        """Of one step on all ranks together."""
        return sum(train_flops(self.config, self.B, self.T, causal=True).values())


LARGE = Config("large", 4, 512, 1408, 8, 4, 64, 4096)
SIZES = {"default": Size(LARGE, 8, 256), "tiny": Size(LARGE.with_(name="tiny", D=128, H=16, F=384), 8, 64, repeat=3)}
SMALL = Size(LARGE.with_(name="small", D=32, H=4, F=64, V=64), 8, 16)  # runs first where memory is measured


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

    def pure(params, state, tokens, targets):
        loss, grads = transformer.loss_and_grads(params, tokens, targets, config, mesh, remat=remat, **options)
        return loss / mesh.size(), *rule.update(grads, state, params, donate=True)

    return stepping(pure, params, rule.init(params), tokens, targets, compiled=compiled)


def theirs(mesh, size: Size, _optimizer: str, tuned: bool = False, compiled: bool = False):
    """By fully_shard over X, parallelize_module over Y, and over Z by ScheduleInterleaved1F1B."""
    warnings.simplefilter("ignore")  # of torch's own code
    (params, tokens, targets), X, Y = given(mesh, size), mesh.sizes.get("X", 1), mesh.sizes.get("Y", 1)
    devices = mesh.device_mesh if mesh.size() > 1 else None

    def part(first=0, last=size.L):
        net = native.Model(params, size.config, size.T, first, last)
        if Y > 1:
            native.split_over_y(net, devices["Y"])
        if X > 1:
            native.fully_sharded(net, net.blocks, devices["X"], keep="Z" in mesh.sizes)
        return net

    def loss(logits, wanted=targets):
        return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum") / (targets.numel() * X)

    if "Z" in mesh.sizes:
        layout = part, size.L, 2, "ScheduleInterleaved1F1B", MICROBATCHES, mesh
        return native.staged(*layout, tokens, targets, loss, "adamw", RATE, tuned)
    side = native.Trained(part(), mesh, compiled, "adamw", RATE, tuned)

    def step():
        with loss_parallel() if Y > 1 else nullcontext():
            share = side.step(tokens, loss)
        return (share.to_local() if Y > 1 else share) / Y

    return step


CONTESTS = {
    each.name: each
    for each in (
        Contest("fsdp", "fully_shard", "X", ours, theirs),
        Contest("tp", "parallelize_module, sequence and loss parallel", "Y", ours, theirs),
        Contest("fsdp_tp", "fully_shard + parallelize_module", "XY", ours, theirs),
        Contest("interleaved", "ScheduleInterleaved1F1B + fully_shard", "XZ", ours, theirs, chunks=2),
    )
}

if __name__ == "__main__":
    compete(__doc__, CONTESTS, SIZES, ["adamw"], small=SMALL)
