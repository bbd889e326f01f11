"""The strategies of Part 5 against one device: loss, gradients, params after AdamW steps, by every option there is.

The first batch's gradients are taken by other options too: activations gathered again or used up, in microbatches, as
partial sums that are reduced later, and by the vjp of forward."""

import pytest
import torch
from problems import (
    AG,
    BLOCKS,
    MESHES,
    RS,
    SIZES,
    STRATEGIES,
    B,
    L,
    close,
    counts,
    drawn,
    one_device,
    pulled,
    specs,
    squares,
    stack,
    trained,
    whole,
)

from scaling import optim, tree
from scaling.collectives import all_reduce, reduce_scatter
from scaling.mesh import AbstractMesh, Mesh
from scaling.strategies import fsdp, pods, zero
from scaling.strategies.stack import Block
from scaling.trace import trace

CASES = [(name, mesh, BLOCKS[0], 0) for name, meshes in MESHES.items() for mesh in meshes]
CASES += [(name, MESHES[name][0 if name == "fsdp_tp" else 1], BLOCKS[1], 0) for name in MESHES]
CASES += [("fsdp_tp", MESHES["fsdp_tp"][0], block, 0) for block in BLOCKS[2:]]  # the layers share their activations
CASES += [("pods", {"P": 2, "X": 2, "Y": 2}, BLOCKS[0], layers) for layers in (1, 2)]


def run(mesh, name, dtype, block, layers):
    """Three steps, and the gradients by the vjp of forward. `layers`: how many of them a bucket holds."""
    strategy, (params, batches) = (STRATEGIES | {"pods": pods})[name], whole(dtype)
    types = specs(strategy), strategy.SPECS["In"]
    bucket = {"bucket_bytes": layers * tree.nbytes(tree.shard(params, specs(strategy), mesh)) // L}

    def step(params, batch):
        In, Target = batch_of(strategy, batch, mesh)
        before = tree.map(torch.clone, (In, params))
        Out, saved = strategy.forward(params, In, mesh, *block)
        dIn, grads = strategy.backward(2 / B * (Out - Target), saved, params, mesh, **bucket)
        tree.check(grads, types[0], SIZES, mesh, dtype)
        assert all(map(torch.equal, tree.leaves(before), tree.leaves((In, params)))), "batch or params were changed"
        return squares(Out, Target), grads, dIn  # Loss[] {U}: this rank's terms

    def forward(params, In):
        return strategy.forward(params, In, mesh, *block)[0]

    shards, (In, Target) = tree.shard(params, types[0], mesh), batches[0]
    losses, first, after = trained(shards, step, batches)
    other_ways(strategy, name, batches[0], shards, mesh, block, bucket, first)
    dOut = 2 / B * (stack(params, In, block) - Target)
    _, by_vjp = pulled(forward, mesh, (params, In), types, strategy.SPECS["Out"], dOut)
    return losses, tree.unshard(first, list(types), mesh), tree.unshard(after, types[0], mesh), [*by_vjp]


def batch_of(strategy, batch, mesh):
    return tree.shard(list(batch), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)


def other_ways(strategy, name, batch, params, mesh, block, bucket, found):
    """Gradients of the first batch. With activations gathered again, or used up, they are `found` to the bit."""
    In, Target = batch_of(strategy, batch, mesh)
    Out, saved = strategy.forward(params, In, mesh, *block, keep=False)
    dOut = 2 / B * (Out - Target)
    for donate in (False, True):
        dIn, grads = strategy.backward(dOut, saved, params, mesh, donate=donate, **bucket)
        assert all(map(torch.equal, tree.leaves([grads, dIn]), tree.leaves(found)))
        if not donate:
            _, sums = strategy.backward(dOut, saved, params, mesh, reduce=False)
    assert saved.layers == []
    with pytest.raises(ValueError, match=f"saved has 0 layers, the params have {L}: .*\n  fix: run forward again"):
        strategy.backward(dOut, saved, params, mesh)
    if name == "pods":  # the flat reduction
        close({key: over_pods_first(key, dW, mesh) for key, dW in sums.items()}, found[0])
    partial, dIns, count = None, [], 2
    for i, (rows, cotangent) in enumerate(zip(In.chunk(count), dOut.chunk(count), strict=True)):
        _, saved = strategy.forward(params, rows, mesh, *block)
        given = partial and {**partial}
        dIn, partial = strategy.backward(cotangent, saved, params, mesh, partial, reduce=i == count - 1, **bucket)
        dIns.append(dIn)
    close([partial, torch.cat(dIns)], found)
    if name in ("data_parallel", "tensor_parallel"):  # a reduction leaves sums as large as they are: in their place
        assert all(partial[key].data_ptr() == given[key].data_ptr() for key in given)


def over_pods_first(name, dW, mesh):
    whole, shard = {"W_in": ("[L, D, F_Y]", "[L, D_X, F_Y]"), "W_out": ("[L, F_Y, D]", "[L, F_Y, D_X]")}[name]
    dW = all_reduce(f"dW{whole} {{U_PX}} -> dW{whole} {{U_X}}", dW, mesh)
    return reduce_scatter(f"dW{whole} {{U_X}} -> dW{shard}", dW, mesh)


def label(value):
    if isinstance(value, tuple):
        return value[0] + "-residual-norm" * value[1]
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "mesh", "block", "layers"), CASES, ids=label)
def test_equal_to_one_device(ranks, name, mesh, block, layers):
    both = layers or (block == BLOCKS[0] and AbstractMesh(mesh).size() == (4 if name == "fsdp_tp" else 2))
    for dtype in (torch.float64, torch.float32) if both else (torch.float64,):
        wanted_losses, first, params = one_device(dtype, block)
        everyone = ranks(run, mesh, name, dtype, block, layers)
        close(sum(losses for losses, *_ in everyone), wanted_losses)
        for _, *found in everyone:
            close(found, [first, params, first])


def run_zero(mesh, stage, layers, donate):
    params, batches = whole()
    bucket = {"bucket_bytes": layers * tree.nbytes(params) // L}
    adamw, shards = optim.adamw(0.01), {name: [spec] * L for name, spec in zero.SHARDS.items()}
    state = zero.init(adamw, params, mesh)
    for batch in batches:
        In, Target = batch_of(zero, batch, mesh)
        with trace() as log:
            Out, saved = zero.forward(params, In, mesh, *BLOCKS[0])
            _, grads = zero.backward(2 / B * (Out - Target), saved, params, mesh, stage=stage, **bucket)
            given = tree.map(torch.clone, params)
            new, state = zero.update(adamw, grads, state, params, mesh, donate=donate, **bucket)
        for found in (grads, state["m"]):
            tree.check(found, shards, SIZES, mesh)
        assert new["W_in"] is params["W_in"] if donate else all(map(torch.equal, params.values(), given.values()))
        params = new
    assert all(event.async_op for event in log.collectives())
    return params, counts(log), log.book_bytes


@pytest.mark.parametrize(("stage", "layers", "donate"), [(1, 0, False), (2, 0, True), (2, 2, False), (2, 3, True)])
def test_zero(ranks, stage, layers, donate):
    """Equal to one device; an AllReduce of DP is a ReduceScatter and an AllGather here: the same bytes."""
    *_, wanted = one_device()
    for params, seen, nbytes in ranks(run_zero, {"X": 4}, stage, layers, donate):
        close(params, wanted)
        calls = 2 * -(-L // max(1, layers))
        assert seen == {(RS, "X"): calls, (AG, "X"): calls}
        assert nbytes == 2 * tree.nbytes(wanted)


def test_a_layer_is_the_books_unless_asked_otherwise():
    In, W_in, W_out = drawn(*[(4, 4)] * 3)
    Out, _ = fsdp.forward({"W_in": W_in[None], "W_out": W_out[None]}, In, Mesh({"X": 1}))
    close(Out, torch.nn.functional.gelu(In @ W_in) @ W_out)
    none = torch.empty(0, 4, 4)
    assert fsdp.forward({"W_in": none, "W_out": none}, In, Mesh({"X": 1}))[0] is In
    block = Block()
    assert block.norm(In) is block.act(In) is In
