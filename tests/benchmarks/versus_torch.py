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

import warnings
from collections.abc import Callable
from functools import partial

import native
import torch
from harness import RATE, SIDES, SIZES, Contest, Size, initial, race, rows
from report import machine, options, show, spread, write

from scaling import optim, tree
from scaling.schedules import make, split_backward
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, zero

OPTIMIZERS = {"sgd": optim.sgd(RATE), "adamw": optim.adamw(RATE)}
BUCKET = 25 << 20  # bytes of gradients in one bucket: DistributedDataParallel's default
FLOAT32 = 4
# Of pipelines. Both sides send what a stage computed to the next as soon as it is there; ours computes dIn, sends it,
# and then dW (`split_backward`), of which it collects several microbatches in one matmul; in 1F1B that keeps three more
# activations.
PIPELINES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
MICROBATCHES = 8
COLLECT = 4  # microbatches in one weight gradient
STAGES = {name: pipeline.SPECS[name] for name in ("W_in", "W_out")}


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
    side = native.Native(name, initial(size, mesh.device), mesh, optimizer, RATE, layout, tuned, compiled)
    types = {"D": "In[B_X, D_Y]", "B": "In[B_XY, D]", "whole": "In[B_X, D]"}[layout]
    for axis in {"X", "Y"} - set(mesh.sizes):
        types = types.replace(axis, "").replace("_]", "]").replace("_,", ",")
    In = tree.shard(rows(size, mesh.device), types, mesh).requires_grad_()
    copies = mesh.sizes["Y"] if layout == "whole" else 1  # of each row, on which every rank computes the whole loss

    def step():
        In.grad = None
        return side.step(In, lambda Out: Out.square().sum() / size.rows) / copies

    return step


def our_pipeline(name: str, mesh, size: Size, optimizer: str) -> Callable:
    schedule = split_backward(make(name, mesh.sizes["Z"], MICROBATCHES), COLLECT)
    params = tree.shard(pipeline.arrange(initial(size, mesh.device), schedule), STAGES, mesh)
    In = rows(size, mesh.device)
    rule = OPTIMIZERS[optimizer]
    state = rule.init(params)

    def loss(Out, Target):
        return Out.square().sum() / size.rows

    def step():
        nonlocal params, state
        Loss, grads = pipeline.value_and_grad(params, In, In, mesh, schedule, loss)
        params, state = rule.update(grads, state, params, donate=True)
        return Loss / mesh.size()

    return step


def their_pipeline(name: str, mesh, size: Size, optimizer: str, tuned: bool = False) -> Callable:
    from torch.distributed import pipelining

    schedule, group = make(name, mesh.sizes["Z"], MICROBATCHES), mesh.group(("Z",)).pg
    params, In, depth = initial(size, mesh.device), rows(size, mesh.device), size.L // schedule.virtual_stages
    own, modules, stages = schedule.stages_of(mesh.coord["Z"]), [], []
    for stage in own:
        layers = slice(stage * depth, (stage + 1) * depth)
        modules.append(torch.nn.Sequential(*map(native.Block, params["W_in"][layers], params["W_out"][layers])))
        stages.append(pipelining.PipelineStage(modules[-1], stage, schedule.virtual_stages, mesh.device, group=group))

    def loss(Out, Target):
        return Out.square().sum() / size.rows

    options = {"loss_fn": loss, "scale_grads": False}
    run = getattr(pipelining, PIPELINES[name])(stages if len(stages) > 1 else stages[0], MICROBATCHES, **options)
    weights = [weight for module in modules for weight in module.parameters()]
    update = native.OPTIMIZERS[optimizer](weights, lr=RATE, **({"fused": True} if tuned else {}))
    first, last = own[0] == 0, own[-1] == schedule.virtual_stages - 1

    def step():
        update.zero_grad()
        losses = []
        run.step(*([In] if first else []), **({"target": In, "losses": losses} if last else {}))
        update.step()
        return sum(losses) if last else torch.zeros((), device=mesh.device)

    return step


def between_stages(mesh: dict, size: Size, chunks: int = 1) -> float:
    """Of one rank, on average: an activation up and a dOut down between each two neighbours of the virtual stages."""
    return 2 * (chunks * mesh["Z"] - 1) / mesh["Z"] * size.rows * size.D * FLOAT32


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
    for name, rival in PIPELINES.items():
        chunks = 2 if name == "interleaved" else 1
        sides = partial(our_pipeline, name), partial(their_pipeline, name)
        made.append(Contest(name, rival, lambda n: {"Z": n}, *sides, partial(between_stages, chunks=chunks), chunks))
    return {each.name: each for each in made}


def report(results: list[dict], args, ranks: int, sizes: dict) -> None:
    """The table of `race`'s rows, and the figures as JSON if asked for."""
    rivals = args.rivals
    setting = f"{ranks} ranks on {machine()}; {args.steps} samples of each side, {args.threads} thread a rank."
    chosen = "; ".join(f"{label}: {sizes[label]}" for label in args.sizes)
    print(f"{setting}\n{chosen}.\n")

    def mb(n):
        return "" if n is None else f"{n / 1e6:.1f}"

    lines = []
    for row in results:
        times = [f"{row['ours'][1] * 1e3:.1f}"]
        for rival in rivals:
            times += [f"{row[rival][1] * 1e3:.1f}", spread(row[f"ratio_{rival}"])]
        sent = [mb(row[key]) for key in ("sent_ours", "wire_bytes", f"sent_{rivals[0]}")]
        peaks = [mb(row[f"peak_{side}"]) for side in ("ours", *rivals)]
        lines.append([row["size"], row["contest"], row["rival"], row["optimizer"], *times, *sent, *peaks])
    headers = ["size", "ours", "PyTorch's", "optimizer", "ms"]
    headers += [header for rival in rivals for header in (rival, "ratio")]
    headers += ["MB sent", "closed form", "theirs", "peak MB", *rivals]
    show(lines, headers, 4)
    write(args.json, {"setting": setting, "sizes": chosen, "results": results})


def main() -> None:
    known, both = contests(), ("sgd", "adamw")
    parser = options(
        __doc__,
        only=known,
        sizes=SIZES,
        optimizers=both,
        rivals=SIDES[1:],
        steps=20,
        threads=1,
        json=None,
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=4)
    args = parser.parse_args()
    if not set(args.rivals) <= set(SIDES[1:]):
        parser.error(f"--rivals {','.join(args.rivals)}: must be of {', '.join(SIDES[1:])}, by commas")
    torch.set_num_threads(1)
    results = []
    for label in args.sizes:
        for name in args.only:
            axes = known[name].axes(args.ranks)
            if 1 in axes.values() or SIZES[label].L % (axes.get("Z", 1) * known[name].chunks):
                continue  # two ranks make no mesh of two axes; and layers are to divide over stages
            for optimizer in args.optimizers:
                row = race(known[name], SIZES[label], optimizer, args.ranks, args.steps, args.threads, args.rivals)
                results.append({"size": label} | row)
    report(results, args, args.ranks, SIZES)


if __name__ == "__main__":
    main()
