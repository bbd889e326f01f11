"""What the chapters of Part 5 share: options, the comparison with one device, the tables, and the verdict.

Only rank 0 prints. Every comparison has a limit; a chapter exits with 1 if one is exceeded.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch.func import grad_and_value

from scaling import data, launch, optim, tree
from scaling.check import check_file
from scaling.mesh import TIMEOUT
from scaling.models import mlp
from scaling.spec import ShardingError, parse
from scaling.trace import Log, trace
from scaling.train.byte_lm import batch_axes, evaluate, loss_and_grads, make_step, param_specs, reduced

EXACT, SINGLE = 1e-12, 2e-5  # relative differences allowed in float64 and float32


def options(doc: str, mesh: str, argv=None, **extra) -> argparse.Namespace:
    """The chapters' command line. `mesh` is the default one; `extra` adds options as name=(default, help)."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc.split("\n")[0], epilog=doc, formatter_class=as_written)
    parser.add_argument("--mesh", default=None, help=f"axes and sizes (default {mesh}, fitted to torchrun's ranks)")
    parser.add_argument("--device", default="cpu", help="cpu (gloo) or cuda (NCCL, a GPU for each rank)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--batch", type=int, default=256, help="rows of the global batch (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of params and data (default 0)")
    parser.add_argument(
        "--text", default=None, help="file to learn (default: the sources of Python's standard library)"
    )
    parser.add_argument("--unchecked", action="store_true", help="do not compare the ranks before each collective")
    for name, (default, text) in extra.items():
        usual = "" if default == "" else f" (default {default})"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text + usual)
    args = parser.parse_args(argv)
    for name in ("steps", "batch"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name} {value}: must be an int of at least 1")
    if args.text is not None and not Path(args.text).is_file():
        parser.error(
            f"--text {args.text}: no such file; give one's path, or leave it out for Python's standard library"
        )
    if args.device not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: must be cpu, or cuda, where each rank takes a GPU of its own")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {args.device}: this machine has no GPU that torch can use; leave it out to run on the CPU"
        )
    try:
        usual = launch.parse_mesh(mesh)
        args.mesh = launch.parse_mesh(args.mesh) if args.mesh else launch.fit(usual)
    except ShardingError as error:
        parser.error(str(error))
    if absent := [axis for axis in usual if axis not in args.mesh]:
        given = ",".join(f"{axis}={size}" for axis, size in args.mesh.items())
        missing = ",".join(f"{axis}=1" for axis in absent)
        parser.error(f"--mesh {given}: lacks {', '.join(absent)}, as in {mesh}; add {missing} to do without")
    if args.batch % (devices := math.prod(args.mesh.values())):
        parser.error(
            f"--batch {args.batch}: does not divide over the {devices} devices of the mesh; try {32 * devices}"
        )
    return args


def run(main: Callable, args: argparse.Namespace) -> None:
    """Run `main(mesh, args) -> failures` on every rank, and exit with 1 if anything failed.

    Before any rank starts the chapter's own lines are checked, as by `python -m scaling.check`.
    """
    if findings := check_file(sys.modules["__main__"].__file__):
        sys.exit("\n".join(map(str, findings)))
    timeout = max(TIMEOUT, args.steps)  # at the end the other ranks wait while rank 0 trains one device
    failures = launch.start(main, args.mesh, args, device=args.device, checked=not args.unchecked, timeout=timeout)
    sys.exit(1 if failures else 0)


class Report:
    """Prints from rank 0, beginning with the first line of the chapter's docstring, and keeps the verdict."""

    def __init__(self, mesh, doc: str = ""):
        self.mesh, self.failures, self.checks, self.began = mesh, [], 0, time.perf_counter()
        if doc:
            self.say(doc.splitlines()[0] + "\n")

    def say(self, text: str = "") -> None:
        if self.mesh.rank == 0:
            print(text, flush=True)

    def title(self, text: str) -> None:
        self.say(f"\n{text}\n{'-' * len(text)}")

    def table(self, rows, headers, **options) -> None:
        self.say(tabulate(rows, headers, "simple", disable_numparse=True, **options))

    def equal(self, rows) -> None:
        """A table of (what, got, wanted, limit): the largest difference, relative to the largest element of wanted."""
        lines = []
        for what, got, wanted, limit in rows:
            pairs = list(zip(tree.leaves(got), tree.leaves(wanted), strict=True))
            differences = [_difference(a, b) for a, b in pairs]
            worst = max(differences)
            lines.append((what, f"{worst:.1e}", f"{limit:.0e}", self.judge(what, worst <= limit)))
        self.table(lines, ["compared with one device", "difference", "limit", "verdict"])

    def same(self, rows, headers) -> None:
        """A table of (what, formula, its value, what was counted): the two numbers must be one."""
        lines = [(w, f, f"{v:,.0f}", f"{c:,.0f}", self.judge(w, v == c)) for w, f, v, c in rows]
        self.table(lines, [*headers, "verdict"], colalign=("left", "left", "right", "right", "left"))

    def judge(self, what: str, ok: bool) -> str:
        self.checks += 1
        if not ok:
            self.failures.append(what)
        return "equal" if ok else "DIFFERENT"

    def done(self) -> list[str]:
        seconds = time.perf_counter() - self.began
        verdict = f"{len(self.failures)} FAILED: {', '.join(self.failures)}" if self.failures else "all hold"
        self.say(f"\nVerdict: {self.checks} comparisons, {verdict} ({seconds:.0f} s)")
        return self.failures


def _difference(a, b) -> float:
    a, b = (torch.as_tensor(t, dtype=torch.float64).cpu() for t in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))


def layer_problem(sizes: dict, types: dict, mesh, seed: int) -> tuple[dict, dict]:
    """One layer of the book in float64: this rank's shards of In, W_in, W_out, dOut, and one device's results, whole.

    `types` is a strategy's SPECS, `sizes` {"B": ..., "D": ..., "F": ...}.
    """
    rng = torch.Generator().manual_seed(seed)
    types = {**types, "dOut": types["Out"]}
    shapes = {name: parse(types[name]).global_shape(sizes) for name in ("In", "W_in", "W_out", "dOut")}
    arrays = {name: torch.randn(shape, generator=rng, dtype=torch.float64) for name, shape in shapes.items()}
    arrays = {name: array.to(mesh.device) for name, array in arrays.items()}
    leaves = {name: arrays[name].clone().requires_grad_() for name in ("In", "W_in", "W_out")}
    Out = leaves["In"] @ leaves["W_in"] @ leaves["W_out"]
    gradients = torch.autograd.grad(Out, list(leaves.values()), arrays["dOut"])
    wanted = {"Out": Out.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: tree.shard(array, types[name], mesh) for name, array in arrays.items()}, wanted


def one_layer(forward, backward, types: dict, sizes: dict, mesh, report: Report, seed: int) -> tuple[Log, Log]:
    """Run a chapter's own layer in float64, show its lines as they ran, and compare it with one device.

    `forward(W_in, W_out, In, mesh) -> (Out, Tmp)`; `backward(dOut, Tmp, W_in, W_out, In, mesh) -> (dIn, dW_in,
    dW_out)`. Returns what was traced, forward and backward.
    """
    report.say(f"{types['In']} * {types['W_in']} * {types['W_out']} -> {types['Out']}")
    shown = " ".join(f"{dim}={size}" for dim, size in sizes.items())
    report.title(f"One layer on {mesh}: the lines as they ran on rank 0, {shown} in float64")
    local, wanted = layer_problem(sizes, types, mesh, seed)
    W_in, W_out, In, dOut = (local[name] for name in ("W_in", "W_out", "In", "dOut"))
    with trace() as fwd:
        Out, Tmp = forward(W_in, W_out, In, mesh)
    with trace() as bwd:
        dIn, dW_in, dW_out = backward(dOut, Tmp, W_in, W_out, In, mesh)
    report.say(f"forward\n{fwd.table()}\n\nbackward\n{bwd.table()}")
    report.say("V is the gathered or unreduced array, the book's measure of bytes; sent is what this rank sends.\n")
    results = {"Out": Out, "dIn": dIn, "dW_in": dW_in, "dW_out": dW_out}
    wanted_types = {name: types[name.removeprefix("d")] for name in results}
    tree.check(results, wanted_types, sizes, mesh, name="results")
    whole = tree.unshard(results, wanted_types, mesh)
    report.equal([(name, whole[name], wanted[name], EXACT) for name in results])
    return fwd, bwd


def stack_equality(strategy, mesh, report: Report, seed: int, steps: int = 3) -> None:
    """The strategy on four layers with gelu, norm and residual, in float64: gradients, and params after AdamW steps."""
    config = mlp.Config(L=4, D=32, F=64, K=4)
    text = data.load_text(max_bytes=50_000).to(mesh.device)
    specs, adamw = param_specs(strategy), optim.adamw(0.01)
    params = mlp.init(config, seed, torch.float64, mesh, specs)
    own = mlp.init(config, seed, torch.float64, device=mesh.device)
    state, own_state, step = adamw.init(params), adamw.init(own), make_step(strategy, adamw, config, mesh)
    size = 32
    local = data.batches(text, config.K, size, mesh, batch_axes(strategy), seed)
    rows = []
    for i, batch, whole in zip(range(steps), local, data.batches(text, config.K, size, seed=seed), strict=False):
        own_grads, own_loss = grad_and_value(mlp.loss_fn)(own, *whole, config)
        if i == 0:
            loss, grads = loss_and_grads(strategy, params, *batch, config, mesh)
            rows += [("loss", reduced(strategy, loss, mesh), own_loss, EXACT)]
            rows += [("every gradient", tree.unshard(grads, specs, mesh), own_grads, EXACT)]
        params, state, _ = step(params, state, batch)
        own, own_state = adamw.update(own_grads, own_state, own)
    rows += [(f"params after {steps} AdamW steps", tree.unshard(params, specs, mesh), own, EXACT)]
    report.equal(rows)


def memory(strategy, mesh, report: Report, params, grads, state, config) -> None:
    """Bytes on each rank of params, gradients and Adam's moments, beside what the types say."""
    specs = param_specs(strategy)
    ours = int(tree.local_nbytes(specs, config.sizes, mesh, torch.float32))
    n, held = config.num_params(), {"params": params, "gradients": grads, "Adam's m and v": [state["m"], state["v"]]}
    factors = {"params": 4, "gradients": 4, "Adam's m and v": 8}
    rows = [
        (what, f"{factors[what]} x {ours // 4:,} of {n:,} params", factors[what] * ours // 4, tree.nbytes(kept))
        for what, kept in held.items()
    ]
    report.same(rows, ["bytes on each rank", "from the types", "formula", "held"])


def training(strategy, mesh, report: Report, args) -> None:
    """Learn real text, bytes as tokens, beside the same run on one device."""
    config = mlp.Config()
    text = data.load_text(args.text, max_bytes=1_000_000).to(mesh.device)
    train, valid = data.split(text)
    entropy = data.order0_entropy(valid)
    specs, adamw = param_specs(strategy), optim.adamw(3e-3, betas=(0.9, 0.99))
    params = mlp.init(config, args.seed, torch.float32, mesh, specs)
    state, step = adamw.init(params), make_step(strategy, adamw, config, mesh)
    axes = batch_axes(strategy)
    batches = data.endless(train, config.K, args.batch, mesh, axes, args.seed)
    first = next(batches)
    _, grads = loss_and_grads(strategy, params, *first, config, mesh)
    memory(strategy, mesh, report, params, grads, state, config)
    report.say(f"\n{config.num_params():,} params, {args.batch} rows a step, text of {len(text):,} bytes")
    began, losses, batch = clock(mesh.device), [], first
    for _ in range(args.steps):
        params, state, metrics = step(params, state, batch)
        losses.append(metrics["loss"])
        batch = next(batches)
    seconds = clock(mesh.device) - began
    held_out = next(iter(data.batches(valid, config.K, min(4096, len(valid) // 16 * 8), mesh, axes, args.seed)))
    score = mlp.bits_per_byte(evaluate(strategy, params, *held_out, config, mesh)).item()
    grads, params = tree.unshard(grads, specs, mesh), tree.unshard(params, specs, mesh)
    if mesh.rank != 0:
        return
    own_losses, own_grads, own, own_seconds = one_device(config, train, adamw, args, mesh.device)
    shown = sorted({0, *range(0, args.steps, max(1, args.steps // 8)), args.steps - 1})
    curve = [(i + 1, *(f"{mlp.bits_per_byte(run[i]).item():.5f}" for run in (losses, own_losses))) for i in shown]
    report.table(curve, ["step", f"bits per byte on {mesh}", "on one device"])
    threads = torch.get_num_threads()
    report.say(f"{seconds:.1f} s on {mesh.size()} ranks, {own_seconds:.1f} s on one device with {threads} thread(s): ")
    report.say("so small a model on ranks that share the cores of one machine shows the algorithm, not its speed\n")
    report.equal([("first gradients, float32", grads, own_grads, SINGLE)])
    drift = max(_difference(a, b) for a, b in zip(losses, own_losses, strict=True))
    end = max(_difference(a, b) for a, b in zip(tree.leaves(params), tree.leaves(own), strict=True))
    report.say(
        f"after {args.steps} steps in float32, rounding has grown to {drift:.0e} of a loss, {end:.0e} of a param\n"
    )
    compared = f"{score:.3f} bits per byte, beside the order-0 entropy of the text, {entropy:.3f}"
    if args.steps < 50:
        report.say(f"validation: {compared} (too few steps to judge)")
    else:
        ok = report.judge("validation", score < entropy - 0.5) == "equal"
        report.say(f"validation: {compared}: {'well under it' if ok else 'NOT well under it'}")


def one_device(config, train, adamw, args, device):
    """The same training by autograd of the stateless module: losses, first gradients, params, seconds."""
    own = mlp.init(config, args.seed, device=device)
    state, losses, first = adamw.init(own), [], None
    began = clock(device)
    for _, batch in zip(range(args.steps), data.endless(train, config.K, args.batch, seed=args.seed), strict=False):
        grads, loss = grad_and_value(mlp.loss_fn)(own, *batch, config)
        first = grads if first is None else first
        own, state = adamw.update(grads, state, own)
        losses.append(loss)
    return losses, first, own, clock(device) - began


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
