"""What a chapter's training loop learned: its losses and memory beside one device's, its score beside the text's."""

import time
from dataclasses import dataclass

import torch
from torch.func import grad_and_value

from scaling import data, optim, tree
from scaling.book.lesson import SINGLE, Report, difference
from scaling.models import mlp
from scaling.train.byte_lm import batch_axes, evaluate, param_specs


@dataclass
class Trained:
    """What a training loop starts from, `config` and `optimizer`, and what it leaves: `losses` of each step, the
    `first` gradients, params, the optimizer's state, and the seconds that it took."""

    config: mlp.Config
    optimizer: optim.Optimizer
    losses: list
    first: dict
    params: dict
    state: dict
    seconds: float


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


def learned(report: Report, strategy, run: Trained, text, args) -> None:
    """What a chapter's training loop did, beside the same run on one device, and beside the entropy of the text."""
    mesh, config, specs = report.mesh, run.config, param_specs(strategy)
    train, valid = data.split(text)
    entropy, axes = data.order0_entropy(valid), batch_axes(strategy)
    memory(strategy, mesh, report, run.params, run.first, run.state, config)
    report.say(f"\n{config.num_params():,} params, {args.batch} rows a step, text of {len(text):,} bytes")
    held_out = next(iter(data.batches(valid, config.K, min(4096, len(valid) // 16 * 8), mesh, axes, args.seed)))
    score = mlp.bits_per_byte(evaluate(strategy, run.params, held_out[0], held_out[1], config, mesh)).item()
    grads, params = tree.unshard(run.first, specs, mesh), tree.unshard(run.params, specs, mesh)
    if mesh.rank != 0:
        return
    losses = run.losses
    own_losses, own_grads, own, own_seconds = one_device(config, train, run.optimizer, args, mesh.device)
    shown = sorted({0, *range(0, args.steps, max(1, args.steps // 8)), args.steps - 1})
    curve = [(i + 1, *(f"{mlp.bits_per_byte(each[i]).item():.5f}" for each in (losses, own_losses))) for i in shown]
    report.table(curve, ["step", f"bits per byte on {mesh}", "on one device"])
    threads = torch.get_num_threads()
    both = f"{run.seconds:.1f} s on {mesh.size()} ranks, {own_seconds:.1f} s on one device"
    report.say(f"{both} with {threads} thread(s): ")
    report.say("so small a model on ranks that share the cores of one machine shows the algorithm, not its speed\n")
    report.equal([("first gradients, float32", grads, own_grads, SINGLE)])
    drift = max(difference(a, b) for a, b in zip(losses, own_losses, strict=True))
    end = max(difference(a, b) for a, b in zip(tree.leaves(params), tree.leaves(own), strict=True))
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
