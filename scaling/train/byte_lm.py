"""Compute the byte model's loss and gradients under a strategy, as pure functions of the params and a batch.

The strategy's own forward and backward run the blocks. The embedding, the head and the loss are the same lines for all
strategies, and take their types from the strategy's data: x and y are the axes over which In's B and D are split, such
as X and Y in In[B_X, D_Y]. Autograd's tape differentiates the head, through its collectives.
"""

import torch

from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter, shard
from scaling.models.mlp import MLPConfig, cross_entropy, embed
from scaling.models.pointwise import rms_norm, vjp
from scaling.spec import Spec, parse

ENDS_SPECS = {"embed": "E[K, V, D]", "head": "W_head[D, V]"}  # the params before and after the layers, unsharded


def param_specs(strategy) -> dict:
    """Return the types of the byte model's params under a strategy: {"embed", "blocks": {"W_in", "W_out"}, "head"}."""
    blocks = {name: str(parse(strategy.SPECS[name]).stacked("L")) for name in ("W_in", "W_out")}
    return {
        "embed": str(end_types("embed", strategy)[0]),
        "blocks": blocks,
        "head": str(end_types("head", strategy)[0]),
    }


def batch_axes(strategy) -> tuple[str, ...]:
    """Return the axes that the batch is split over, which `data.batches` needs."""
    return parse(strategy.SPECS["In"]).axes_of("B")


def reduced(strategy, loss, mesh):
    """Loss[] {U_XY} -> Loss[]: the mean over the global batch, from each rank's terms."""
    return all_reduced(parse("Loss[]").with_unreduced(parse(strategy.SPECS["In"]).axes), loss, mesh)


def evaluate(strategy, params, tokens, targets, config: MLPConfig, mesh) -> torch.Tensor:
    """Return the mean loss over all ranks' rows, in nats per byte, on every rank."""
    E, W_head = _whole(params, strategy, mesh)
    Out, _ = run_blocks(strategy, params, embed(E, tokens), config, mesh)
    return reduced(
        strategy, head_loss(strategy, W_head, Out, targets, config, mesh, _rows(strategy, targets, mesh)), mesh
    )


def loss_and_grads(strategy, params, tokens, targets, config: MLPConfig, mesh, microbatches: int = 1):
    """Return (Loss[] {U_XY}: this rank's terms of the mean over the global batch, grads typed as the params).

    Raises:
        ValueError: The rows do not divide into the microbatches.
    """
    if len(tokens) % microbatches:
        raise ValueError(
            f"{len(tokens)} rows on each rank do not make {microbatches} microbatches of one size"
            "\n  fix: give a number of rows that it divides"
        )
    E, W_head = _whole(params, strategy, mesh)
    batch, losses, dIns = _rows(strategy, targets, mesh), [], []
    partial, dW_head, blocks = None, torch.zeros_like(W_head), params["blocks"]
    parts = list(zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True))
    for i, (some, wanted) in enumerate(parts):
        Out, saved = run_blocks(strategy, params, embed(E, some), config, mesh)
        loss, pull = vjp(lambda W, Out, t=wanted: head_loss(strategy, W, Out, t, config, mesh, batch), W_head, Out)
        dW, dOut = pull(torch.ones_like(loss))
        dIn, partial = strategy.backward(dOut, saved, blocks, mesh, partial, i == microbatches - 1, donate=True)
        dW_head = dW_head + dW
        losses.append(loss)
        dIns.append(dIn)
    (dE,) = vjp(lambda E: embed(E, tokens), E)[1](torch.cat(dIns))
    ends = {"embed": dE, "head": dW_head}
    grads = {name: end_gradient(name, dW, strategy, mesh) for name, dW in ends.items()}
    return torch.stack(losses).sum(), grads | {"blocks": partial}


def run_blocks(strategy, params, In, config, mesh):
    """Run the strategy's forward over the blocks; return (Out, the activations saved for backward)."""
    return strategy.forward(params["blocks"], In, mesh, config.activation, config.residual, config.norm)


def _rows(strategy, targets, mesh) -> int:
    """Return B, the number of rows in the global batch."""
    return len(targets) * mesh.size(batch_axes(strategy))


def end_types(name: str, strategy):
    """Return (the type it is stored in, the type it is used in) for "embed" or "head".

    In use, D is split as In's D is. In storage, D is also split over the axes that shard the layers' D, as in FSDP.
    """
    In, W_in = parse(strategy.SPECS["In"]), parse(strategy.SPECS["W_in"])
    used = parse(ENDS_SPECS[name]).with_axes("D", In.axes_of("D"))
    return used.with_axes("D", In.axes_of("D") + W_in.axes_of("D")), used


def _whole(params, strategy, mesh):
    """Gather E[K, V, D_Y] and W_head[D_Y, V] over the axes that shard them in storage but not in use."""
    gathered = []
    for name in ("embed", "head"):
        stored, used = end_types(name, strategy)
        W = params[name]
        gathered.append(W if stored == used else all_gather(f"{stored} -> {used}", W, mesh))
    return gathered


def end_gradient(name: str, dW, strategy, mesh):
    """Reduce the gradient of "embed" or "head" to the type in which that param is stored.

    The gradient arrives with {U_X}, because each rank has only its own rows.
    """
    (stored, used), x = end_types(name, strategy), batch_axes(strategy)
    left = stored.with_unreduced([axis for axis in x if axis not in stored.axes])
    if stored != used:
        dW = reduce_scatter(f"{used.with_unreduced(x)} -> {left}", dW, mesh)
    return all_reduced(left, dW, mesh)


def head_loss(strategy, W_head, Out, targets, config: MLPConfig, mesh, batch: int) -> torch.Tensor:
    """Loss[] {U_XY}: each rank's terms of the mean over `batch` rows, of Out[B_X, D_Y], W_head[D_Y, V], targets[B_X].

    Contracting D_Y leaves the logits unreduced over Y. They are reduce-scattered over B, so no term is counted twice.
    """
    In = parse(strategy.SPECS["In"])
    x, y = In.axes_of("B"), In.axes_of("D")
    rows, row_labels = parse("logits[B, V]").with_axes("B", x), parse("targets[B]").with_axes("B", x)
    if config.norm:
        square = Out.square().sum(-1, keepdim=True) / config.D
        Out = rms_norm(Out, all_reduced(parse("Ms[B, 1]").with_axes("B", x).with_unreduced(y), square, mesh))
    W = end_types("head", strategy)[1]
    logits = einsum(f"{In.with_name('Out')} * {W} -> {rows.with_unreduced(y)}", Out, W_head)
    if y:
        logits = reduce_scatter(f"{rows.with_unreduced(y)} -> {rows.with_axes('B', x + y)}", logits, mesh)
        targets = shard(f"{row_labels} -> {row_labels.with_axes('B', x + y)}", targets, mesh)
    return cross_entropy(logits, targets, batch)


def all_reduced(spec: Spec, x: torch.Tensor, mesh) -> torch.Tensor:
    """Sum x over the axes that its type is unreduced over, by an all-reduce; return x itself if there are none."""
    return all_reduce(f"{spec} -> {spec.with_unreduced(())}", x, mesh) if spec.unreduced else x
