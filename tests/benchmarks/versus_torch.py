"""The strategies of `scaling.strategies` against PyTorch's own: time of a step, bytes on the wire, peak memory.

    python tests/benchmarks/versus_torch.py --ranks 4 --sizes default        the table of docs/speed.md
    python tests/benchmarks/versus_torch.py --ranks 2 --only dp,fsdp --sizes tiny,default --steps 40 --json out.json

Both sides have the same model (L blocks In W_in, gelu, W_out, without residual), initial values, batch, dtype (float32)
and optimizer, and run in turn on the same ranks of one process group, one thread a rank. A step is forward, loss (sum
of squares / rows), backward with the gradient of the input, and the update of the params. Ours are pure functions that
are given their buffers (`donate=True`), unchecked. PyTorch's come twice: as they are by default, and tuned for speed
(gradients as views of buckets; fused optimizers, or foreach where an SGD of DTensors has none). A ratio is that of the
times of each pair of samples: its median, and its quartiles in brackets. MB are 10^6 bytes: sent by one rank in one
step, as the kernel counts them; and the peak of a step beyond what the rank had before there was a model.
"""

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pipelines
import torch
from harness import RATE, SIDES, SIZES, Contest, Size, initial, machine, race, rows
from native import Native

from scaling import optim, tree
from scaling.common.console import Parser
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel, zero

OPTIMIZERS = {"sgd": optim.sgd(RATE), "adamw": optim.adamw(RATE)}
BUCKET = 25 << 20  # bytes of gradients in one bucket: DistributedDataParallel's default
FLOAT32 = 4


def ours(strategy, mesh, size: Size, optimizer: str, compiled: bool = False, **options) -> Callable:
    types = strategy.SPECS
    specs = {name: types[name].replace("[", "[L, ") for name in ("W_in", "W_out")}
    params = tree.shard(initial(size, mesh.device), specs, mesh)
    In = tree.shard(rows(size, mesh.device), types["In"], mesh)
    rule = OPTIMIZERS[optimizer]
    init, update = rule.init, rule.update
    if strategy is zero:
        init = partial(zero.init, rule, mesh=mesh)
        update = partial(zero.update, rule, mesh=mesh, bucket_bytes=options.get("bucket_bytes", 0))
    state = init(params)

    def pure(params, state, In):
        Out, saved = strategy.forward(params, In, mesh)
        _, grads = strategy.backward(Out * (2 / size.rows), saved, params, mesh, donate=True, **options)
        return Out.square().sum() / size.rows, *update(grads, state, params, donate=True)

    run = torch.compile(pure, fullgraph=True, dynamic=False) if compiled else pure

    def step():
        nonlocal params, state
        loss, params, state = run(params, state, In)
        return loss

    return step


def theirs(
    name: str, mesh, size: Size, optimizer: str, tuned: bool = False, layout: str = "D", compiled: bool = False
) -> Callable:
    warnings.simplefilter("ignore")  # of torch's own code
    native = Native(name, initial(size, mesh.device), mesh, optimizer, RATE, layout, tuned, compiled)
    types = {"D": "In[B_X, D_Y]", "B": "In[B_XY, D]", "whole": "In[B_X, D]"}[layout]
    for axis in {"X", "Y"} - set(mesh.sizes):
        types = types.replace(axis, "").replace("_]", "]").replace("_,", ",")
    In = tree.shard(rows(size, mesh.device), types, mesh).requires_grad_()
    copies = mesh.sizes["Y"] if layout == "whole" else 1  # of each row, on which every rank computes the whole loss

    def step():
        In.grad = None
        return native.step(In, lambda Out: Out.square().sum() / size.rows) / copies

    return step


def over_x(passes: int) -> Callable:
    """Bytes sent when the params, or their gradients, pass so many times over the links of X, each 1 - 1/X of them."""
    return lambda mesh, size: passes * (1 - 1 / mesh["X"]) * size.params * FLOAT32


def over_y(mesh: dict, size: Size) -> float:
    """Each layer gathers and scatters its activations[B_X, D] once forward and once backward."""
    return size.L * 4 * (1 - 1 / mesh["Y"]) * size.rows / mesh.get("X", 1) * size.D * FLOAT32


def over_both(mesh: dict, size: Size) -> float:
    return over_x(3)(mesh, size) / mesh["Y"] + over_y(mesh, size)


def both_axes(ranks: int) -> dict[str, int]:
    return {"X": 2, "Y": ranks // 2}


def contests() -> dict[str, Contest]:
    def contest(label, rival, axes, strategy, wire_bytes, layout="D", **options):
        name = strategy.__name__.split(".")[-1]
        sides = partial(ours, strategy, **options), partial(theirs, name, layout=layout)
        return Contest(label, rival, axes, *sides, wire_bytes)

    data, tensor = (lambda n: {"X": n}), (lambda n: {"Y": n})
    made = [
        contest("dp", "DistributedDataParallel", data, data_parallel, over_x(2), bucket_bytes=BUCKET),
        contest("zero", "ZeroRedundancyOptimizer", data, zero, over_x(2), bucket_bytes=4 << 20),
        contest("fsdp", "fully_shard", data, fsdp, over_x(3)),
        contest("tp", "parallelize_module, In[B, D_Y]", tensor, tensor_parallel, over_y),
        contest("tp-rows", "parallelize_module, In[B_Y, D]", tensor, tensor_parallel, over_y, "B"),
        contest("tp-whole", "parallelize_module, In[B, D]", tensor, tensor_parallel, over_y, "whole"),
        contest("fsdp_tp", "fully_shard + parallelize_module", both_axes, fsdp_tp, over_both),
    ]
    return {each.name: each for each in (*made, *pipelines.contests())}


def table(results: list[dict], rivals: tuple[str, ...]) -> str:
    from tabulate import tabulate  # here: gpu.py runs without it

    def mb(n):
        return "" if n is None else f"{n / 1e6:.1f}"

    lines = []
    for row in results:
        times = [f"{row['ours'][1] * 1e3:.1f}"]
        for rival in rivals:
            low, middle, high = row[f"ratio_{rival}"]
            times += [f"{row[rival][1] * 1e3:.1f}", f"{middle:.2f} [{low:.2f}, {high:.2f}]"]
        sent = [mb(row[key]) for key in ("sent_ours", "wire_bytes", f"sent_{rivals[0]}")]
        peaks = [mb(row[f"peak_{side}"]) for side in ("ours", *rivals)]
        lines.append([row["size"], row["contest"], row["rival"], row["optimizer"], *times, *sent, *peaks])
    headers = ["size", "ours", "PyTorch's", "optimizer", "ms"]
    headers += [header for rival in rivals for header in (rival, "ratio")]
    headers += ["MB sent", "closed form", "theirs", "peak MB", *rivals]
    return tabulate(
        lines, headers, "github", disable_numparse=True, colalign=("left",) * 4 + ("right",) * (len(headers) - 4)
    )


def main() -> None:
    known = contests()
    parser = Parser(description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=4)
    parser.add_argument("--only", default=",".join(known), help="contests, by commas: %(default)s")
    parser.add_argument("--sizes", default=",".join(SIZES), help="sizes, by commas: %(default)s")
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--rivals", default=",".join(SIDES[1:]), help="of PyTorch's, by commas: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="timed samples of each side")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if not set(args.rivals.split(",")) <= set(SIDES[1:]):
        parser.error(f"--rivals {args.rivals}: must be of {', '.join(SIDES[1:])}, by commas")
    torch.set_num_threads(1)
    rivals, results = tuple(args.rivals.split(",")), []
    for label in args.sizes.split(","):
        for name in args.only.split(","):
            axes = known[name].axes(args.ranks)
            if 1 in axes.values() or SIZES[label].L % (axes.get("Z", 1) * known[name].chunks):
                continue  # two ranks make no mesh of two axes; and layers are to divide over stages
            for optimizer in args.optimizers.split(","):
                row = race(known[name], SIZES[label], optimizer, args.ranks, args.steps, args.threads, rivals)
                results.append({"size": label} | row)
                ratios = [f"{rival} {row[f'ratio_{rival}'][1]:.2f}" for rival in rivals]
                print(f"{label} {name} {optimizer}: {', '.join(ratios)}", file=sys.stderr, flush=True)
    setting = f"{args.ranks} ranks on {machine()}; {args.steps} samples of each side, {args.threads} thread a rank."
    sizes = "; ".join(f"{label}: {SIZES[label]}" for label in args.sizes.split(","))
    print(f"{setting}\n{sizes}.\n\n{table(results, rivals)}")
    if args.json:
        args.json.write_text(json.dumps({"setting": setting, "sizes": sizes, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
