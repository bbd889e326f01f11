"""A chapter's strategy on four layers, and its training loop, both compared with one device."""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.func import grad_and_value

from scaling import data, optim, tree
from scaling.book.listing import SINGLE, STACK, difference, stack_equality
from scaling.book.page import Page
from scaling.collectives import broadcast
from scaling.common.console import integer
from scaling.models import mlp
from scaling.spec import format_axes
from scaling.train.byte_lm import batch_axes, evaluate, loss_and_grads, param_specs, reduced

OPTIONS = {  # the options of a chapter that trains
    "steps": (40, "training steps", integer(1, 10**7)),
    "batch": (256, "rows of the global batch", integer(1, 100_000)),
    "text": ("", "file to learn (default: the sources of Python's standard library)"),
}
SIZES = {
    "D": STACK.D,
    "F": STACK.F,
    "V": STACK.V,
}  # the sizes that must divide over a mesh; the trained model has multiples of them
CONFIG, ADAMW = mlp.MLPConfig(), optim.adamw(3e-3, betas=(0.9, 0.99))
JUDGED = 40  # after this many steps the score must be well under the text's order-0 entropy


@dataclass
class Trained:
    """The results of a training loop: each step's loss, the `first` gradients, params, optimizer state, seconds."""

    losses: list
    first: dict
    params: dict
    state: dict
    seconds: float


@dataclass
class Learned:
    """A training run, with whole arrays.

    `alike`: rows (name, the largest difference of any rank from rank 0, limit); `memory`: rows (name, formula, bytes
    from the types, bytes held); `score`: bits per byte on the text's held-out part.
    """

    run: Trained
    alike: list
    memory: list
    score: float


def train(layer, mesh, text, args) -> Trained:
    """Run the training loop that 05_dp shows, with a chapter's layer on its mesh."""
    params = mlp.init(CONFIG, args.seed, torch.float32, mesh, param_specs(layer))
    state, losses, first, began = ADAMW.init(params), [], None, clock(mesh.device)
    batches = data.endless(text, CONFIG.K, args.batch, mesh, batch_axes(layer), args.seed)
    for _, (tokens, targets) in zip(range(args.steps), batches, strict=False):
        loss, grads = loss_and_grads(layer, params, tokens, targets, CONFIG, mesh)
        first = grads if first is None else first
        params, state = ADAMW.update(grads, state, params)
        losses.append(reduced(layer, loss, mesh))
    return Trained(losses, first or {}, params, state, clock(mesh.device) - began)


def learn(mesh, strategy, train: Callable, args) -> Learned:
    """Run a chapter's loop, `train(strategy, mesh, text, args) -> Trained`, on a mesh."""
    learnt, valid = data.split(load_given_text(args, mesh.device))
    run, axes, specs = train(strategy, mesh, learnt, args), batch_axes(strategy), param_specs(strategy)
    rows = min(512 if args.small else 4096, len(valid) // 2) // mesh.size() * mesh.size()
    held_out = next(iter(data.batches(valid, CONFIG.K, rows, mesh, axes, args.seed)))
    score = mlp.bits_per_byte(evaluate(strategy, run.params, held_out[0], held_out[1], CONFIG, mesh)).item()
    first, params = (tree.map(torch.Tensor.cpu, tree.unshard(x, specs, mesh)) for x in (run.first, run.params))
    found = Trained([float(x) for x in run.losses], first, params, {}, run.seconds)
    return Learned(found, ranks_alike(found.losses, first, mesh), _memory(strategy, mesh, run), score)


def ranks_alike(losses: list[float], first: dict, mesh) -> list[tuple]:
    """Return rows (name, the largest difference of any rank from rank 0, limit).

    One device is compared with rank 0's results, so the other ranks must have equal ones.
    """

    def of_rank_0(x):
        whole = torch.as_tensor(x, dtype=torch.float64).to(mesh.device).flatten()
        return broadcast(f"x[N] {{U_{format_axes(mesh.sizes)}}} -> x[N]", whole, mesh).cpu().view_as(torch.as_tensor(x))

    pairs = (("losses of all ranks, to rank 0's", losses), ("first gradients of all ranks, to rank 0's", first))
    return [(what, difference(x, tree.map(of_rank_0, x), mesh), SINGLE) for what, x in pairs]


def load_given_text(args, device) -> torch.Tensor:
    """Return the text to learn, on the device."""
    return data.load_text(args.text or None, max_bytes=1_000_000).to(device)


def _memory(strategy, mesh, run: Trained) -> list[tuple]:
    """Return rows of the bytes on each rank of params, gradients and Adam's moments, with the bytes from the types."""
    ours = int(tree.local_nbytes(param_specs(strategy), CONFIG.sizes, mesh, torch.float32))
    n, m_and_v = CONFIG.num_params(), [run.state["m"], run.state["v"]]
    held = {"params": (4, run.params), "gradients": (4, run.first), "Adam's m and v": (8, m_and_v)}
    return [
        (what, f"{factor} x {ours // 4:,} of {n:,} params", factor * ours // 4, tree.nbytes(kept))
        for what, (factor, kept) in held.items()
    ]


def both(mesh, strategy, train: Callable, args) -> tuple[list, Learned]:
    """Return the comparison of four layers with one device and the chapter's training run, on ranks started once."""
    return stack_equality(mesh, strategy, args.seed), learn(mesh, strategy, train, args)


def show(page: Page, strategy, train: Callable = train) -> None:
    """Show the strategy on four layers compared with one device, and then the chapter's training run.

    The run is compared with the same run on one device, and its score with the text's entropy.
    """
    args = Namespace(**vars(page.args))
    args.steps = min(args.steps, 3) if page.small else args.steps
    layers, found = page.on_ranks(both, strategy, train, args)
    page.title("Four layers of it with gelu, norm and residual, in float64")
    page.equal(layers)
    page.title("Memory and training: a byte model on real text, in float32")
    page.same(found.memory, ["bytes on each rank", "from the types", "formula", "held"])
    text, ours = load_given_text(args, torch.device(args.device)), found.run
    page.say(f"\n{CONFIG.num_params():,} params, {args.batch} rows a step, text of {len(text):,} bytes")
    single = beside_one_device(page, ours.losses, ours.first, found.alike, CONFIG, args)
    if single is None:
        return
    page.say(f"{ours.seconds:.1f} s on the ranks, {single.seconds:.1f} s on one device: so small a model on ranks that "
             "share the cores of one machine shows the algorithm, not its speed.")  # fmt: skip
    drift, end = difference(ours.losses, single.losses), difference(ours.params, single.params)
    page.say(f"After {args.steps} steps in float32, rounding has grown to {drift:.0e} of a loss, {end:.0e} of a param.")
    entropy = data.order0_entropy(data.split(text)[1])
    page.say(f"Validation: {found.score:.3f} bits per byte; the order-0 entropy of the text is {entropy:.3f}.")
    if args.steps >= JUDGED:
        page.check("validation is well under the order-0 entropy", found.score < entropy - 0.5)


def beside_one_device(page: Page, losses, first, alike: list, config, args) -> Trained | None:
    """Print the losses of a run on ranks with one device's, and the difference of the first gradients.

    `alike` are the rows of `ranks_alike`. Returns the run of one device, or None on ranks other than 0, which skip it.
    """
    if not page.first:
        return None
    device = torch.device(args.device)
    text = data.split(load_given_text(args, device))[0]
    single = one_device(config, text, args, device)
    shown = sorted({0, *range(0, len(losses), max(1, len(losses) // 8)), len(losses) - 1})
    bits = [[mlp.bits_per_byte(torch.tensor(each[i])).item() for i in shown] for each in (losses, single.losses)]
    page.table([(i + 1, f"{a:.5f}", f"{b:.5f}") for i, a, b in zip(shown, *bits, strict=True)],
               ["step", "bits per byte on ranks", "on one device"])  # fmt: skip
    page.say()
    pairs = (("loss", losses[0], single.losses[0]), ("gradients", first, single.first))
    page.equal([*((f"first {what}, float32", difference(got, want), SINGLE) for what, got, want in pairs), *alike])
    return single


def one_device(config: mlp.MLPConfig, text, args, device) -> Trained:
    """Train on one device, by autograd of the stateless module."""
    single = mlp.init(config, args.seed, device=device)
    state, losses, first, began = ADAMW.init(single), [], None, clock(device)
    for _, batch in zip(range(args.steps), data.endless(text, config.K, args.batch, seed=args.seed), strict=False):
        grads, loss = grad_and_value(mlp.loss_fn)(single, *batch, config)
        first = grads if first is None else first
        single, state = ADAMW.update(grads, state, single)
        losses.append(loss)
    return Trained([float(x) for x in losses], first or {}, single, state, clock(device) - began)


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
