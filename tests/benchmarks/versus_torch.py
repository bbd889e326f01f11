"""The strategies of `scaling.strategies` against PyTorch's own: time of a step, bytes on the wire, peak memory.

    python tests/benchmarks/versus_torch.py --ranks 4 --sizes default        the table of docs/speed.md
    python tests/benchmarks/versus_torch.py --ranks 2 --only dp,fsdp --sizes tiny,default --steps 40

Both sides have the same model (L blocks In W_in, gelu, W_out, without residual), initial values, batch, dtype (float32)
and optimizer, and run in turn on the same ranks of one process group, one thread a rank. A step is forward, loss (sum
of squares / rows), backward with the gradient of the input, and the update of the params. Ours are pure functions that
are given their buffers (`donate=True`), unchecked. PyTorch's come twice: as they are by default, and tuned for speed
(gradients as views of buckets; fused optimizers, or foreach where an SGD of DTensors has none). A ratio is that of the
times of each pair of samples: its median, and its quartiles in brackets. MB are 10^6 bytes: sent by one rank in one
step, as the kernel counts them; and the peak of a step beyond what the rank had before there was a model.
"""

import warnings
from collections.abc import Callable
from functools import partial

import native
import torch
from harness import RATE, SIZES, Contest, Size, compete, stepping

from scaling import optim, tree
from scaling.schedules import make, split_backward
from scaling.spec import present
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, zero

OPTIMIZERS = {"sgd": optim.sgd(RATE), "adamw": optim.adamw(RATE)}
BUCKET = 25 << 20  # bytes of gradients in one bucket: DistributedDataParallel's default
FLOAT32 = 4
# Of pipelines. Both sides send what a stage computed to the next as soon as it is there; ours computes dIn, sends it,
# and then dW (`split_backward`), of which it collects several microbatches in one matmul; in 1F1B that keeps three more
# activations.
MICROBATCHES = 8
COLLECT = 4  # microbatches in one weight gradient
STAGES = {name: pipeline.SPECS[name] for name in ("W_in", "W_out")}


def initial(size: Size, device="cpu") -> dict[str, torch.Tensor]:
    """The whole params, the same on every rank: unit scale through the stack of gelus."""
    to = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": size.dtype}
    return {
        "W_in": torch.randn(size.L, size.D, size.F, **to) / size.D**0.5,
        "W_out": torch.randn(size.L, size.F, size.D, **to) / (0.65 * size.F**0.5),
    }


def rows(size: Size, device="cpu") -> torch.Tensor:
    """The whole batch In[B, D]."""
    g = torch.Generator(device).manual_seed(1)
    return torch.randn(size.rows, size.D, generator=g, device=device, dtype=size.dtype)


def squares(size: Size) -> Callable:
    """The loss: a rank's share of the sum of squares / rows."""
    return lambda Out, *_: Out.square().sum() / size.rows


def ours(strategy, mesh, size: Size, optimizer: str, compiled: bool = False, **options) -> Callable:
    types = strategy.SPECS
    specs = {name: types[name].replace("[", "[L, ") for name in ("W_in", "W_out")}
    params = tree.shard(initial(size, mesh.device), specs, mesh)
    In = tree.shard(rows(size, mesh.device), types["In"], mesh)
    rule = OPTIMIZERS[optimizer]
    init, update = rule.init, rule.update
    if strategy is zero:
        init = partial(zero.init, rule, mesh=mesh)
        update = partial(zero.update, rule, mesh=mesh)

    def pure(params, state, In):
        Out, saved = strategy.forward(params, In, mesh)
        _, grads = strategy.backward(Out * (2 / size.rows), saved, params, mesh, donate=True, **options)
        return Out.square().sum() / size.rows, *update(grads, state, params, donate=True)

    return stepping(pure, params, init(params), In, compiled=compiled)


def theirs(name: str, mesh, size: Size, optimizer: str, tuned=False, layout="D", compiled=False) -> Callable:
    warnings.simplefilter("ignore")  # of torch's own code
    side = native.Native(name, initial(size, mesh.device), mesh, optimizer, RATE, layout, tuned, compiled)
    types = {"D": "In[B_X, D_Y]", "B": "In[B_XY, D]", "whole": "In[B_X, D]"}[layout]
    In = tree.shard(rows(size, mesh.device), str(present(types, mesh)), mesh).requires_grad_()
    copies = mesh.sizes["Y"] if layout == "whole" else 1  # of each row, on which every rank computes the whole loss

    def step():
        In.grad = None
        return side.step(In, squares(size)) / copies

    return step


def our_pipeline(name: str, mesh, size: Size, optimizer: str) -> Callable:
    schedule = split_backward(make(name, mesh.sizes["Z"], MICROBATCHES), COLLECT)
    params = tree.shard(pipeline.arrange(initial(size, mesh.device), schedule), STAGES, mesh)
    In, rule = rows(size, mesh.device), OPTIMIZERS[optimizer]

    def pure(params, state):
        Loss, grads = pipeline.value_and_grad(params, In, In, mesh, schedule, squares(size))
        return Loss / mesh.size(), *rule.update(grads, state, params, donate=True)

    return stepping(pure, params, rule.init(params))


def their_pipeline(schedule: str, chunks: int, mesh, size: Size, optimizer: str, tuned: bool = False) -> Callable:
    params, In = initial(size, mesh.device), rows(size, mesh.device)

    def stage(first, last):
        return torch.nn.Sequential(*map(native.Block, params["W_in"][first:last], params["W_out"][first:last]))

    layout = stage, size.L, chunks, schedule, MICROBATCHES, mesh
    return native.staged(*layout, In, In, squares(size), optimizer, RATE, tuned)


def over_x(passes: int) -> Callable:
    """Bytes sent when the params, or their gradients, pass so many times over the links of X, each 1 - 1/X of them."""
    return lambda mesh, size: passes * (1 - 1 / mesh["X"]) * size.params * FLOAT32


def over_y(mesh: dict, size: Size) -> float:
    """Each layer gathers and scatters its activations[B_X, D] once forward and once backward."""
    return size.L * 4 * (1 - 1 / mesh["Y"]) * size.rows / mesh.get("X", 1) * size.D * FLOAT32


def over_both(mesh: dict, size: Size) -> float:
    return over_x(3)(mesh, size) / mesh["Y"] + over_y(mesh, size)


def between_stages(chunks: int) -> Callable:
    """Of one rank, on average: an activation up and a dOut down between each two neighbours of the virtual stages."""
    return lambda mesh, size: 2 * (chunks * mesh["Z"] - 1) / mesh["Z"] * size.rows * size.D * FLOAT32


def contest(name: str, rival: str, axes: str, strategy, wire_bytes: Callable, layout="D", **options) -> Contest:
    sides = partial(ours, strategy, **options), partial(theirs, strategy.__name__.split(".")[-1], layout=layout)
    return Contest(name, rival, axes, *sides, wire_bytes)


def staged(name: str, rival: str, chunks: int = 1) -> Contest:
    sides = partial(our_pipeline, name), partial(their_pipeline, rival, chunks)
    return Contest(name, rival, "Z", *sides, between_stages(chunks), chunks)


CONTESTS = {
    each.name: each
    for each in (
        contest("dp", "DistributedDataParallel", "X", data_parallel, over_x(2), bucket_bytes=BUCKET),
        contest("zero", "ZeroRedundancyOptimizer", "X", zero, over_x(2), bucket_bytes=4 << 20),
        contest("fsdp", "fully_shard", "X", fsdp, over_x(3)),
        contest("tp", "parallelize_module, In[B, D_Y]", "Y", tensor_parallel, over_y),
        contest("tp-rows", "parallelize_module, In[B_Y, D]", "Y", tensor_parallel, over_y, "B"),
        contest("tp-whole", "parallelize_module, In[B, D]", "Y", tensor_parallel, over_y, "whole"),
        contest("fsdp_tp", "fully_shard + parallelize_module", "XY", fsdp_tp, over_both),
        staged("gpipe", "ScheduleGPipe"),
        staged("1f1b", "Schedule1F1B"),
        staged("interleaved", "ScheduleInterleaved1F1B", chunks=2),
    )
}

if __name__ == "__main__":
    compete(__doc__, CONTESTS, SIZES, [*OPTIMIZERS], small=SIZES["tiny"])
