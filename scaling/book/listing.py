"""A chapter's one-layer listing beside one device: its lines as they ran, and L layers of it with AdamW."""

from collections import OrderedDict

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

from scaling import data, optim, tree
from scaling.book.lesson import EXACT, Report
from scaling.models import mlp
from scaling.spec import parse
from scaling.strategies.block import Block
from scaling.trace import Log, trace
from scaling.train.byte_lm import batch_axes, loss_and_grads, make_step, param_specs, reduced


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

    `forward(W_in, W_out, In, mesh, block) -> (Out, saved)`; `backward(W_in, W_out, dOut, saved, mesh, block) -> (dIn,
    dW_in, dW_out)`; the block is the book's, with neither activation nor norm. Returns what was traced, both passes.
    """
    report.say(f"{types['In']} * {types['W_in']} * {types['W_out']} -> {types['Out']}")
    shown = " ".join(f"{dim}={size}" for dim, size in sizes.items())
    report.title(f"One layer on {mesh}: the lines as they ran on rank 0, {shown} in float64")
    local, wanted = layer_problem(sizes, types, mesh, seed)
    W_in, W_out, In, dOut = (local[name] for name in ("W_in", "W_out", "In", "dOut"))
    with trace() as fwd:
        Out, saved = forward(W_in, W_out, In, mesh, Block())
    with trace() as bwd:
        dIn, dW_in, dW_out = backward(W_in, W_out, dOut, saved, mesh, Block())
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
        own_grads, own_loss = grad_and_value(mlp.loss_fn)(own, whole[0], whole[1], config)
        if i == 0:
            loss, grads = loss_and_grads(strategy, params, batch[0], batch[1], config, mesh)
            rows += [("loss", reduced(strategy, loss, mesh), own_loss, EXACT)]
            rows += [("every gradient", tree.unshard(grads, specs, mesh), own_grads, EXACT)]
        params, state, _ = step(params, state, batch)
        own, own_state = adamw.update(own_grads, own_state, own)
    rows += [(f"params after {steps} AdamW steps", tree.unshard(params, specs, mesh), own, EXACT)]
    report.equal(rows)


def module_equality(gradients, types: dict, mesh, report: Report, seed: int) -> None:
    """A chapter's `gradients(module, params, x, mesh)` of an unmodified nn.Module, beside one device, in float64.

    `types`: those of the params, by dotted name; x[B, D] is split over X where the mesh has it.
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
    report.say(f"What the types made it move: {moved}\n")
    report.equal([(name, W, wanted[name], EXACT) for name, W in tree.unshard(got, types, mesh).items()])
