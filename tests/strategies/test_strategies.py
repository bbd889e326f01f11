"""The strategies of Part 5 against one device: loss, gradients, params after AdamW steps, by every option there is.

The first batch's gradients are taken by other options too: activations gathered again or used up, in microbatches, as
partial sums that are reduced later, and by the vjp of forward."""

import pytest
import torch
from problems import AG, BLOCKS, MESHES, RS, SIZES, STRATEGIES, B, L, close, counts, one_device, specs, whole
from torch.func import vjp

from scaling import optim, tree
from scaling.collectives import all_reduce, reduce_scatter
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import parse
from scaling.strategies import fsdp, pods, zero
from scaling.strategies.layers import _room
from scaling.strategies.stack import Block
from scaling.trace import trace

CASES = [(name, mesh, BLOCKS[0], 0) for name, meshes in MESHES.items() for mesh in meshes]
CASES += [(name, MESHES[name][0 if name == "fsdp_tp" else 1], BLOCKS[1], 0) for name in MESHES]
CASES += [("fsdp_tp", MESHES["fsdp_tp"][0], block, 0) for block in BLOCKS[2:]]  # the layers share their activations
CASES += [("pods", {"P": 2, "X": 2, "Y": 2}, BLOCKS[0], layers) for layers in (1, 2)]


def run_steps(mesh, name, dtype, block, layers):
    """`layers`: how many of them a bucket holds."""
    strategy, (params, batches) = (STRATEGIES | {"pods": pods})[name], whole(dtype)
    types = strategy.SPECS
    params = tree.shard(params, specs(strategy), mesh)
    bucket = {"bucket_bytes": layers * tree.nbytes(params) // L}
    adamw, losses, first = optim.adamw(0.01), [], None
    state = adamw.init(params)
    for In, target in batches:
        In, target = tree.shard([In, target], [types["In"], types["Out"]], mesh)
        before = In.clone(), tree.map(torch.clone, params)
        Out, saved = strategy.forward(params, In, mesh, *block)
        losses.append((Out - target).square().sum() / B)  # Loss[] {U}: this rank's terms
        dOut = 2 / B * (Out - target)
        found = strategy.backward(dOut, saved, params, mesh, **bucket)
        tree.check(found[1], specs(strategy), SIZES, mesh, dtype)
        if first is None:
            for other in other_ways(strategy, name, In, dOut, params, mesh, block, bucket, found):
                close(other, found, dtype)
            first = tree.unshard(found[1], specs(strategy), mesh), tree.unshard(found[0], types["In"], mesh)
        assert all(map(torch.equal, tree.leaves(before), tree.leaves((In, params)))), "batch or params were changed"
        params, state = adamw.update(found[1], state, params)
    return torch.stack(losses), *first, tree.unshard(params, specs(strategy), mesh)


def other_ways(strategy, name, In, dOut, params, mesh, block, bucket, found):
    """(dIn, grads) of one batch. With activations gathered again, or used up, they are `found` to the bit."""
    _, saved = strategy.forward(params, In, mesh, *block, keep=False)
    dIn, sums = strategy.backward(dOut, saved, params, mesh, reduce=False)
    _, twice = strategy.backward(dOut, saved, params, mesh, partial=tree.map(torch.clone, sums), **bucket)
    yield dIn, tree.map(lambda g: g / 2, twice)
    if name == "pods":  # the flat reduction
        yield dIn, {key: over_pods_first(key, dW, mesh) for key, dW in sums.items()}
    for donate in (False, True):
        again = strategy.backward(dOut, saved, params, mesh, donate=donate, **bucket)
        assert all(map(torch.equal, tree.leaves(again), tree.leaves(found)))
    assert saved.layers == []
    with pytest.raises(ValueError, match=f"saved has 0 layers, the params have {L}: .*\n  fix: run forward again"):
        strategy.backward(dOut, saved, params, mesh)
    partial, dIns, count = None, [], 2
    for i, (rows, cotangent) in enumerate(zip(In.chunk(count), dOut.chunk(count), strict=True)):
        _, saved = strategy.forward(params, rows, mesh, *block)
        dIn, partial = strategy.backward(cotangent, saved, params, mesh, partial, reduce=i == count - 1, **bucket)
        dIns.append(dIn)
    yield torch.cat(dIns), partial
    _, pull = vjp(lambda params, In: strategy.forward(params, In, mesh, *block)[0], params, In)
    grads, dIn = pull(dOut)
    yield dIn, {key: replicated_sum(key, g, strategy, mesh) for key, g in grads.items()}


def over_pods_first(name, dW, mesh):
    whole, shard = {"W_in": ("[L, D, F_Y]", "[L, D_X, F_Y]"), "W_out": ("[L, F_Y, D]", "[L, F_Y, D_X]")}[name]
    dW = all_reduce(f"dW{whole} {{U_PX}} -> dW{whole} {{U_X}}", dW, mesh)
    return reduce_scatter(f"dW{whole} {{U_X}} -> dW{shard}", dW, mesh)


def replicated_sum(name, dW, strategy, mesh):
    """A replicated weight's cotangent is unreduced over what splits the rows: that AllReduce is the caller's."""
    type_ = specs(strategy)[name]
    over = [axis for axis in "PX" if f"_{axis}" not in type_ and mesh.sizes.get(axis, 1) > 1]
    over = [axis for axis in over if axis in parse(strategy.SPECS["In"]).axes_of("B")]
    return all_reduce(f"{type_} {{U_{''.join(over)}}} -> {type_}", dW, mesh) if over else dW


def label(value):
    if isinstance(value, tuple):
        return value[0] + "-residual-norm" * value[1]
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "mesh", "block", "layers"), CASES, ids=label)
def test_equal_to_one_device(ranks, name, mesh, block, layers):
    both = layers or (block == BLOCKS[0] and AbstractMesh(mesh).size() == (4 if name == "fsdp_tp" else 2))
    for dtype in (torch.float64, torch.float32) if both else (torch.float64,):
        losses, *wanted = one_device(dtype, block)
        results = ranks(run_steps, mesh, name, dtype, block, layers)
        close(sum(result[0] for result in results), torch.stack(losses), dtype)
        for result in results:
            for got, want in zip(result[1:], wanted, strict=True):
                close(got, want, dtype)


def whole_sums(mesh, name):
    """Whether gradients that a reduction leaves as large as they were took the place of their partial sums."""
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In = tree.shard(batches[0][0], strategy.SPECS["In"], mesh)
    Out, saved = strategy.forward(params, In, mesh)
    _, sums = strategy.backward(Out, saved, params, mesh, reduce=False)
    _, grads = strategy.backward(Out, saved, params, mesh, partial=sums)
    return all(grads[name].data_ptr() == sums[name].data_ptr() for name in sums)


@pytest.mark.parametrize(("name", "mesh"), [("data_parallel", {"X": 2}), ("tensor_parallel", {"Y": 2})])
def test_gradients_that_are_whole_take_the_place_of_their_partial_sums(ranks, name, mesh):
    assert all(ranks(whole_sums, mesh, name))


def run_zero(mesh, stage, layers, donate):
    params, batches = whole(torch.float64)
    bucket = {"bucket_bytes": layers * tree.nbytes(params) // L}
    adamw, types, shards = optim.adamw(0.01), zero.SPECS, {name: [spec] * L for name, spec in zero.SHARDS.items()}
    state = zero.init(adamw, params, mesh)
    for In, target in batches:
        In, target = tree.shard([In, target], [types["In"], types["Out"]], mesh)
        with trace() as log:
            Out, saved = zero.forward(params, In, mesh, *BLOCKS[0])
            _, grads = zero.backward(2 / B * (Out - target), saved, params, mesh, stage=stage, **bucket)
            tree.check(grads, shards, SIZES, mesh)
            given = tree.map(torch.clone, params)
            new, state = zero.update(adamw, grads, state, params, mesh, donate=donate, **bucket)
        unchanged = all(map(torch.equal, tree.leaves(params), tree.leaves(given)))
        assert new["W_in"] is params["W_in"] if donate else unchanged
        params = new
    tree.check(state["m"], shards, SIZES, mesh)
    return params, counts(log), log.book_bytes


@pytest.mark.parametrize(("stage", "layers", "donate"), [(1, 0, False), (2, 0, True), (2, 2, False), (2, 3, True)])
def test_zero(ranks, stage, layers, donate):
    """Equal to one device; an AllReduce of DP is a ReduceScatter and an AllGather here: the same bytes."""
    wanted = one_device(torch.float64, BLOCKS[0])[3]
    for params, seen, nbytes in ranks(run_zero, {"X": 4}, stage, layers, donate):
        close(params, wanted, torch.float64)
        calls = 2 * -(-L // max(1, layers))
        assert seen == {(RS, "X"): calls, (AG, "X"): calls}
        assert nbytes == 2 * tree.nbytes(wanted)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("dim", range(4))
def test_the_blocks_that_a_reduction_scatters_lie_in_one_piece(dim, together):
    """Those of all layers, or of each layer alone."""
    room = _room(torch.empty(0), (2, 3, 4, 5), dim, together)
    assert room.shape == (2, 3, 4, 5)
    assert (room.movedim(dim, 0 if together else 1) if dim else room).is_contiguous()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_an_unknown_activation_is_refused_before_any_layer_runs(strategy):
    mesh = AbstractMesh({"X": 2, "Y": 2})
    params = {name: torch.empty(0, 4, 4, device="meta") for name in ("W_in", "W_out")}
    In = torch.empty(4, 4, device="meta")
    with trace() as log, pytest.raises(ValueError, match="tanh"):
        strategy.forward(params, In, mesh, activation="tanh")
    assert not log.events
    assert strategy.forward(params, In, mesh, activation="relu")[0] is In


def test_a_layer_is_the_books_unless_asked_otherwise():
    In, W_in, W_out = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    Out, _ = fsdp.forward({"W_in": W_in[None], "W_out": W_out[None]}, In, Mesh({"X": 1}))
    torch.testing.assert_close(Out, torch.nn.functional.gelu(In @ W_in) @ W_out)
    block = Block()
    assert block.norm(In) is block.act(In) is In
