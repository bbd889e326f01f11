"""Compare a chapter's one-layer listing with one device: its lines as they ran, its bytes, and L layers with AdamW.

The functions that run on ranks take a mesh and return plain values; `show_module` and `show_layer` print them.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vjp

from scaling import data, optim, tree
from scaling.book.arrays import largest, operands
from scaling.book.page import Page
from scaling.models import mlp
from scaling.show import svg
from scaling.show.frames import frames_of
from scaling.spec import parse
from scaling.strategies.stack import Block
from scaling.trace import Log, trace
from scaling.train.byte_lm import batch_axes, loss_and_grads, param_specs, reduced

EXACT, SINGLE = 1e-12, 2e-5  # relative differences allowed in float64 and float32
STACK = mlp.MLPConfig(L=4, D=32, F=64, K=4)  # the layers that are compared with one device


def difference(a, b, mesh=None) -> float:
    """Return the largest difference of two trees, each leaf's relative to the largest element of b's leaf.

    On a mesh it is the largest over all ranks' trees; all ranks must call it.
    """
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    both = ([torch.as_tensor(x, dtype=torch.float64).cpu() for x in pair] for pair in pairs)
    return largest((float((x - y).abs().max() / y.abs().max().clamp(min=1e-300)) for x, y in both), mesh)


def lines(log: Log) -> list[tuple]:
    """Return the rows (line, V bytes, sent, FLOPs) of the events in a log."""
    return [
        (str(event), event.nbytes if event.op not in ("Einsum", "Slice") else "", event.wire_bytes or "",
         event.flops or "")
        for event in log.events
    ]  # fmt: skip


def show_lines(page: Page, title: str, rows: list[tuple], flops: bool = True) -> None:
    """Print a table of `lines`: V is the gathered or unreduced array, the book's measure; sent is per rank."""
    page.title(title)
    page.table([row[: 3 + flops] for row in rows], ["line", "V bytes", "sent", "FLOPs"][: 3 + flops])
    mesh = dict.fromkeys(page.args.mesh, 2)  # in a notebook a slider goes through the lines, on two devices an axis
    page.show("", lambda: svg.player(frames_of([row[0] for row in rows]), mesh))


# An nn.Module, by its params' types


def module_equality(mesh, gradients: Callable, types: dict, seed: int) -> tuple[str, list]:
    """Run a chapter's `gradients(module, params, x, mesh)` of an unmodified nn.Module in float64.

    Returns (the number of each collective, rows against one device). `types` are the params' types, by dotted name;
    x[B, D] is split over X if the mesh has it.
    """
    torch.manual_seed(seed)
    D, F = 8 * mesh.size(), 16 * mesh.size()
    layers = {"fc1": nn.Linear(D, F), "act": nn.GELU(), "fc2": nn.Linear(F, D)}
    module = nn.Sequential(OrderedDict(layers)).to(mesh.device, torch.float64)
    whole = {name: W.detach() for name, W in module.named_parameters()}
    x = torch.randn(4 * mesh.size(), D, dtype=torch.float64).to(mesh.device)
    wanted = torch.func.grad(lambda params: functional_call(module, params, (x,)).square().sum())(whole)
    rows = "x[B_X, D]" if "X" in mesh.sizes else "x[B, D]"
    with trace() as log:
        got = gradients(module, tree.shard(whole, types, mesh), tree.shard(x, rows, mesh), mesh)
    moved = ", ".join(f"{log.count(op)} {op}" for op in dict.fromkeys(event.op for event in log.collectives()))
    whole = tree.unshard(got, types, mesh)
    return moved, [(name, difference(W, wanted[name], mesh), EXACT) for name, W in whole.items()]


def show_module(page: Page, gradients: Callable, types: dict) -> None:
    """Show the gradients of an nn.Module on the chapter's mesh, compared with one device."""
    moved, rows = page.on_ranks(module_equality, gradients, types, page.args.seed)
    page.say(f"What the types made it move: {moved}\n")
    page.equal(rows)


# One layer of the book's model


class Ran(NamedTuple):
    """One layer on ranks: the lines of both passes, their bytes by the book's count, rows against one device."""

    lines: tuple[list, list]
    nbytes: tuple[int, int]
    rows: list


def _one_layer(mesh, strategy, sizes: dict, seed: int) -> Ran:
    """Run a chapter's layer in float64 and compare it with one device; the block has neither activation nor norm."""
    types = {name: strategy.SPECS[name] for name in ("In", "W_in", "W_out", "Out")}
    whole, local = operands(types, sizes, mesh, seed)  # "Out" is its cotangent
    *inputs, dOut = whole.values()
    product, pull, *_ = vjp(lambda In, W_in, W_out: In @ W_in @ W_out, *inputs)
    wanted = product, *pull(dOut)
    In, W_in, W_out, dOut = local.values()
    with trace() as there:
        Out, saved = strategy.layer_forward(W_in, W_out, In, mesh, Block())
    with trace() as back:
        dIn, dW_in, dW_out = strategy.layer_backward(W_in, W_out, dOut, saved, mesh, Block())
    results = {"Out": Out, "dIn": dIn, "dW_in": dW_in, "dW_out": dW_out}
    wanted_types = {name: types[name.removeprefix("d")] for name in results}
    tree.check(results, wanted_types, sizes, mesh, name="results")
    whole = tree.unshard(results, wanted_types, mesh)
    rows = [(name, difference(whole[name], x, mesh), EXACT) for name, x in zip(results, wanted, strict=True)]
    return Ran((lines(there), lines(back)), (there.book_bytes, back.book_bytes), rows)


def show_layer(page: Page, strategy, sizes: dict) -> tuple[int, int]:
    """Show the chapter's layer on its mesh: the lines as they ran, its results, and return the bytes of both passes."""
    ran = page.on_ranks(_one_layer, strategy, sizes, page.args.seed)
    shown = " ".join(f"{dim}={size}" for dim, size in sizes.items())
    for rows, which in zip(ran.lines, ("forward", "backward"), strict=True):
        show_lines(page, f"The {which} pass as it ran on rank 0: {shown}, float64", rows)
    page.say("\nV is the gathered or unreduced array, the book's measure; sent is what this rank sends.\n")
    page.equal(ran.rows)
    axes = ",".join(f"{axis}=2" for axis in page.args.mesh)
    command = f"python -m scaling.show listing {sys.argv[0]} --mesh {axes}"
    page.show(f"\nWhich device holds which block after each line: {command}", str)
    return ran.nbytes


def both_passes(strategy, sizes: dict, mesh, dtype: torch.dtype = torch.bfloat16) -> tuple[Log, Log]:
    """Return the logs of a strategy's forward and backward, through one layer if `sizes` have no L.

    They run on zeros, or on an abstract mesh on shapes alone.
    """
    types = {name: strategy.SPECS[name] for name in ("W_in", "W_out", "In")}
    types |= {name: types[name].replace("[", "[L, ") for name in ("W_in", "W_out")}
    shapes = {name: parse(text).local_shape({"L": 1} | sizes, mesh) for name, text in types.items()}
    params = {name: torch.zeros(shape, dtype=dtype, device=mesh.device) for name, shape in shapes.items()}
    params = {name: tree.declare(x, types[name], mesh) for name, x in params.items()}
    In = params.pop("In")
    with trace() as there:
        Out, saved = strategy.forward(params, In, mesh, activation="none")
    with trace() as back:
        strategy.backward(Out, saved, params, mesh)
    return there, back


def show_times(page: Page, what: str, rows: list[tuple]) -> None:
    """Print rows of (`what`, T_math, T_comms), in seconds, with their ratio and which of the two binds."""
    words = [(n, 1e3 * math, 1e3 * comms, math / comms, _bound(math, comms)) for n, math, comms in rows]
    page.table(words, [what, "T_math, ms", "T_comms, ms", "T_math / T_comms", "bound by"])


def _bound(math: float, comms: float) -> str:
    return "compute" if math >= comms else "communication"


# Several layers


def stack_equality(mesh, strategy, seed: int) -> list:
    """Run four layers with gelu, norm and residual in float64; compare gradients, params after three AdamW steps."""
    config = STACK
    text = data.load_text(max_bytes=50_000).to(mesh.device)
    specs, adamw = param_specs(strategy), optim.adamw(0.01)
    params = mlp.init(config, seed, torch.float64, mesh, specs)
    single = mlp.init(config, seed, torch.float64, device=mesh.device)
    state, single_state, size = adamw.init(params), adamw.init(single), 8 * mesh.size()
    local = data.batches(text, config.K, size, mesh, batch_axes(strategy), seed)
    rows = []
    for i, batch, whole in zip(range(3), local, data.batches(text, config.K, size, seed=seed), strict=False):
        single_grads, single_loss = grad_and_value(mlp.loss_fn)(single, whole[0], whole[1], config)
        loss, grads = loss_and_grads(strategy, params, batch[0], batch[1], config, mesh)
        if i == 0:
            rows += [("loss", difference(reduced(strategy, loss, mesh), single_loss, mesh), EXACT)]
            rows += [("every gradient", difference(tree.unshard(grads, specs, mesh), single_grads, mesh), EXACT)]
        params, state = adamw.update(grads, state, params)
        single, single_state = adamw.update(single_grads, single_state, single)
    whole = tree.unshard(params, specs, mesh)
    return [*rows, ("params after 3 AdamW steps", difference(whole, single, mesh), EXACT)]
