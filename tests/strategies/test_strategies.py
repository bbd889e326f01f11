"""The strategies of Part 5 against one device: loss, gradients, params after AdamW steps; collectives and bytes."""

from collections import Counter

import pytest
import torch
from torch.func import vjp

from scaling import optim, tree
from scaling.collectives import Deferred, Pending, all_reduce
from scaling.mesh import AbstractMesh, Mesh
from scaling.models.mlp import MLPConfig, MLPStack
from scaling.spec import parse
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pods, tensor_parallel, zero
from scaling.strategies.block import Block
from scaling.strategies.grads import layers_a_bucket
from scaling.trace import trace

STRATEGIES = {s.__name__.split(".")[-1]: s for s in (data_parallel, fsdp, tensor_parallel, fsdp_tp)}
L, B, D, F = 3, 16, 16, 32
SIZES = {"L": L, "B": B, "D": D, "F": F}
MESHES = {
    "data_parallel": [{"X": 1}, {"X": 2}, {"X": 4}],
    "fsdp": [{"X": 1}, {"X": 2}, {"X": 4}],
    "tensor_parallel": [{"Y": 2}, {"Y": 4}],
    "fsdp_tp": [{"X": 2, "Y": 2}, {"X": 4, "Y": 2}, {"X": 1, "Y": 2}, {"X": 4, "Y": 1}],
}
BLOCKS = [("gelu", True, True), ("gelu", False, False), ("relu", False, False), ("none", False, False)]
CASES = [(name, mesh, BLOCKS[0]) for name, meshes in MESHES.items() for mesh in meshes]
CASES += [(name, MESHES[name][0 if name == "fsdp_tp" else 1], BLOCKS[1]) for name in MESHES]
CASES += [("fsdp_tp", MESHES["fsdp_tp"][0], block) for block in BLOCKS[2:]]  # the layers share their activations
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}  # relative to the largest element; never to be loosened


def specs(strategy):
    """The params' types with their stacked layers."""
    return {name: strategy.SPECS[name].replace("[", "[L, ") for name in ("W_in", "W_out")}


def whole(dtype):
    g = torch.Generator().manual_seed(0)
    params = {
        "W_in": torch.randn(L, D, F, generator=g, dtype=torch.float64) / D**0.5,
        "W_out": torch.randn(L, F, D, generator=g, dtype=torch.float64) / F**0.5,
    }
    batches = torch.randn(3, 2, B, D, generator=g, dtype=torch.float64)  # inputs and targets of three steps
    return tree.map(lambda p: p.to(dtype), params), batches.to(dtype)


def one_device(dtype, block):
    """The reference, by nn.Module, autograd and torch.optim: losses, first gradients, params after 3 steps."""
    params, batches = whole(dtype)
    activation, residual, norm = block
    model = (
        MLPStack(MLPConfig(L=L, D=D, F=F, activation=activation, residual=residual, norm=norm))
        .to_empty(device="cpu")
        .to(dtype)
    )
    model.load_state_dict(params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, first = [], None
    for In, target in batches:
        In = In.clone().requires_grad_()
        optimizer.zero_grad()
        loss = (model(In) - target).square().sum() / B
        loss.backward()
        losses.append(loss.detach())
        first = first or ({name: p.grad.clone() for name, p in model.named_parameters()}, In.grad)
        optimizer.step()
    return losses, *first, {name: p.detach().clone() for name, p in model.named_parameters()}


def run_steps(mesh, name, dtype, block):
    strategy, (params, batches) = STRATEGIES[name], whole(dtype)
    types = strategy.SPECS
    params = tree.shard(params, specs(strategy), mesh)
    adamw, losses, first = optim.adamw(0.01), [], None
    state = adamw.init(params)
    for In, target in batches:
        In, target = tree.shard([In, target], [types["In"], types["Out"]], mesh)
        before = In.clone(), tree.map(torch.clone, params)
        Out, saved = strategy.forward(params, In, mesh, *block)
        losses.append((Out - target).square().sum() / B)  # Loss[] {U}: this rank's terms
        dIn, grads = strategy.backward(2 / B * (Out - target), saved, params, mesh)
        assert torch.equal(before[0], In), "the input was changed"
        assert all(map(torch.equal, tree.leaves(before[1]), tree.leaves(params))), "the params were changed"
        tree.check(grads, specs(strategy), SIZES, mesh, dtype)
        if first is None:
            first = tree.unshard(grads, specs(strategy), mesh), tree.unshard(dIn, types["In"], mesh)
        params, state = adamw.update(grads, state, params)
    return torch.stack(losses), *first, tree.unshard(params, specs(strategy), mesh)


def close(got, wanted, dtype):
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max(), f"{(a - b).abs().max()} of {b.abs().max()}"


def label(value):
    if isinstance(value, tuple):
        return value[0] + "-residual-norm" * value[1]
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "block"), CASES, ids=label)
def test_equal_to_one_device(ranks, name, mesh, block):
    both = block == BLOCKS[0] and AbstractMesh(mesh).size() == (4 if name == "fsdp_tp" else 2)
    for dtype in (torch.float64, torch.float32) if both else (torch.float64,):
        wanted = one_device(dtype, block)
        results = ranks(run_steps, mesh, name, dtype, block)
        close(sum(result[0] for result in results), torch.stack(wanted[0]), dtype)
        for result in results:
            close(result[1], wanted[1], dtype)
            close(result[2], wanted[2], dtype)
            close(result[3], wanted[3], dtype)


def one_layer(mesh, name, **keep):
    """One forward and backward of one layer of B x D x F on an AbstractMesh: the two logs."""
    strategy, meta = STRATEGIES[name], {"dtype": torch.float32, "device": "meta"}
    shape = lambda key, **more: torch.empty(types[key].local_shape(SIZES, mesh), **meta)  # noqa: E731
    types = {key: parse(text) for key, text in strategy.SPECS.items()}
    params = {key: shape(key)[None] for key in ("W_in", "W_out")}
    with trace() as forward:
        Out, saved = strategy.forward(params, shape("In"), mesh, **keep)
    with trace() as backward:
        strategy.backward(Out, saved, params, mesh)
    return forward, backward


def counts(log):
    return Counter((event.op, "".join(event.axes)) for event in log.collectives())


AG, RS, AR = "AllGather", "ReduceScatter", "AllReduce"
LEDGER = {  # book map: collectives of one layer, forward and backward
    "data_parallel": ({}, {(AR, "X"): 2}),
    "fsdp": ({(AG, "X"): 2}, {(AG, "X"): 2, (RS, "X"): 2}),
    "tensor_parallel": ({(AG, "Y"): 1, (RS, "Y"): 1}, {(AG, "Y"): 1, (RS, "Y"): 1}),
    "fsdp_tp": (
        {(AG, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1},
        {(AG, "X"): 2, (RS, "X"): 2, (AG, "Y"): 1, (RS, "Y"): 1},
    ),
}


X, Y = 4, 2
BD, DF = 4 * B * D, 4 * D * F  # bytes of the activations and of one weight in float32
BYTES = {  # Part 5, Takeaways (erratum E-5.1 for the backward of FSDP + TP), with 4 bytes an element instead of 2
    "data_parallel": (0, 4 * DF),
    "fsdp": (2 * DF, 4 * DF),
    "tensor_parallel": (2 * BD, 2 * BD),
    "fsdp_tp": (2 * BD // X + 2 * DF // Y, 2 * BD // X + 4 * DF // Y),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_collectives_and_bytes_of_one_layer(name):
    mesh, axes = AbstractMesh({"X": X, "Y": Y}), "".join(STRATEGIES[name].SPECS.values())
    logs = forward, backward = one_layer(mesh, name)
    assert (counts(forward), counts(backward)) == LEDGER[name]
    assert (forward.book_bytes, backward.book_bytes) == BYTES[name]
    flops = 2 * B * D * F // ((X if "_X" in axes else 1) * (Y if "_Y" in axes else 1))
    assert [log.flops for log in logs] == [2 * flops, 4 * flops]
    if "_Y" in axes:
        again = one_layer(mesh, name, keep=False)[1]
        assert counts(again) == counts(backward) + Counter({(AG, "Y"): 1})
        assert again.book_bytes == backward.book_bytes + BD // (X if "_X" in axes else 1)


def run_vjp(mesh, name, block):
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In, dOut = tree.shard(list(batches[0]), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    with trace() as by_hand:
        Out, saved = strategy.forward(params, In, mesh, *block)
        dIn, grads = strategy.backward(dOut, saved, params, mesh)
    with trace() as by_vjp:
        Out_vjp, pull = vjp(lambda params, In: strategy.forward(params, In, mesh, *block)[0], params, In)
        grads_vjp, dIn_vjp = pull(dOut)
        if name == "data_parallel":  # a replicated weight's cotangent is unreduced: the AllReduce is the caller's
            for key, spec in (("W_in", "dW_in[D, F]"), ("W_out", "dW_out[F, D]")):
                line = f"{spec} {{U_X}} -> {spec}"
                grads_vjp[key] = torch.stack([all_reduce(line, g, mesh) for g in grads_vjp[key]])
    close([Out_vjp, dIn_vjp, grads_vjp], [Out, dIn, grads], torch.float64)
    return counts(by_hand) - counts(by_vjp), counts(by_vjp) - counts(by_hand), by_hand.book_bytes - by_vjp.book_bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_backward_is_the_vjp_of_forward(ranks, name):
    """In numbers and in collectives, but for the weights that the explicit backward gathers again and a vjp keeps."""
    mesh = {"X": 2, "Y": 2}
    again = {(AG, "X"): 2 * L} if "fsdp" in name else {}
    again_bytes = L * 2 * 8 * D * F // (2 if name == "fsdp_tp" else 1) if "fsdp" in name else 0
    for result in ranks(run_vjp, mesh, name, BLOCKS[0]):
        assert result == (Counter(again), Counter(), again_bytes)


def run_microbatches(mesh, name, count):
    """The gradients of one batch, taken whole and in `count` microbatches, with the collectives of both."""
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In, dOut = tree.shard(list(batches[0]), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    _, saved = strategy.forward(params, In, mesh)
    with trace() as once:
        dIn, wanted = strategy.backward(dOut, saved, params, mesh)
    partial, dIns = None, []
    for i, (rows, cotangent) in enumerate(zip(In.chunk(count), dOut.chunk(count), strict=True)):
        _, saved = strategy.forward(params, rows, mesh)
        with trace() as log:
            last = i == count - 1
            dIn_rows, partial = strategy.backward(cotangent, saved, params, mesh, partial, reduce=last)
        dIns.append(dIn_rows)
        if not last:
            assert not any(event.op in (AR, RS) and event.axes == ("X",) for event in log.events)
    close([torch.cat(dIns), partial], [dIn, wanted], torch.float64)
    over_x = [Counter({k: n for k, n in counts(each).items() if k[1] == "X"}) for each in (once, log)]
    return over_x[0] == over_x[1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_microbatches_synchronise_once(ranks, name):
    assert all(ranks(run_microbatches, {"X": 2, "Y": 2}, name, 4))


@pytest.mark.parametrize(("dtype", "width"), [(torch.int8, 1), (torch.int8, 3), (torch.float64, 2)])
def test_as_many_layers_as_fit_in_a_bucket(dtype, width):
    params = {name: torch.empty(5, width, dtype=dtype)[:, some] for name, some in (("a", slice(1)), ("b", slice(1, 9)))}
    for nbytes in range(64):
        fitting = [layers for layers in range(1, 65) if layers * width * dtype.itemsize <= nbytes]
        assert layers_a_bucket(nbytes, params) == max(fitting, default=1)


def run_buckets(mesh, bucket_bytes):
    params, batches = whole(torch.float64)
    In, dOut = tree.shard(list(batches[0]), ["In[B_X, D]", "In[B_X, D]"], mesh)
    _, saved = data_parallel.forward(params, In, mesh)
    _, wanted = data_parallel.backward(dOut, saved, params, mesh)
    with trace() as log:
        _, grads = data_parallel.backward(dOut, saved, params, mesh, bucket_bytes=bucket_bytes)
    close(grads, wanted, torch.float64)
    return log.count(AR), log.book_bytes


@pytest.mark.parametrize(("layers", "reduces"), [(1, 6), (2, 4), (3, 2), (99, 2)])
def test_buckets(ranks, layers, reduces):
    assert ranks(run_buckets, {"X": 2}, layers * 2 * 8 * D * F) == [(reduces, 2 * L * 2 * 8 * D * F)] * 2


def run_zero(mesh, stage, layers, donate):
    params, batches = whole(torch.float64)
    bucket = {"bucket_bytes": layers * 2 * 8 * D * F}
    adamw, types = optim.adamw(0.01), zero.SPECS
    state = zero.init(adamw, params, mesh)
    for In, target in batches:
        In, target = tree.shard([In, target], [types["In"], types["Out"]], mesh)
        with trace() as log:
            Out, saved = zero.forward(params, In, mesh, *BLOCKS[0])
            _, grads = zero.backward(2 / B * (Out - target), saved, params, mesh, stage=stage, **bucket)
            tree.check(grads, {name: [spec] * L for name, spec in zero.SHARDS.items()}, SIZES, mesh)
            given = tree.map(torch.clone, params)
            new, state = zero.update(adamw, grads, state, params, mesh, donate=donate, **bucket)
            if donate:
                assert new["W_in"] is params["W_in"]
            else:
                assert all(map(torch.equal, tree.leaves(params), tree.leaves(given)))
            params = new
    tree.check(state["m"], {name: [spec] * L for name, spec in zero.SHARDS.items()}, SIZES, mesh)
    return params, counts(log), log.book_bytes


@pytest.mark.parametrize(("stage", "layers", "donate"), [(1, 0, False), (2, 0, True), (2, 2, False), (2, 3, True)])
def test_zero(ranks, stage, layers, donate):
    """Equal to one device; an AllReduce of DP is a ReduceScatter and an AllGather here: the same bytes."""
    wanted = one_device(torch.float64, BLOCKS[0])[3]
    for params, seen, nbytes in ranks(run_zero, {"X": 4}, stage, layers, donate):
        close(params, wanted, torch.float64)
        calls = 2 * -(-L // max(1, layers))
        assert seen == {(RS, "X"): calls, (AG, "X"): calls}
        assert nbytes == L * 4 * 8 * D * F


def test_keep_or_gather_again(ranks):
    for name, mesh in (("tensor_parallel", {"Y": 2}), ("fsdp_tp", {"X": 2, "Y": 2})):
        assert all(ranks(run_keep, mesh, name))


def run_keep(mesh, name):
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In, dOut = tree.shard(list(batches[0]), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    results = []
    for keep in (True, False):
        _, saved = strategy.forward(params, In, mesh, *BLOCKS[0], keep=keep)
        results.append(strategy.backward(dOut, saved, params, mesh))
    return all(map(torch.equal, tree.leaves(results[0]), tree.leaves(results[1])))


def run_donated(mesh, name):
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In, dOut = tree.shard(list(batches[0]), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    _, saved = strategy.forward(params, In, mesh)
    wanted = strategy.backward(dOut, saved, params, mesh)
    assert len(saved.layers) == L
    given = strategy.backward(dOut, saved, params, mesh, donate=True)
    assert saved.layers == []
    with pytest.raises(ValueError, match=f"saved has 0 layers, the params have {L}: .*\n  fix: run forward again"):
        strategy.backward(dOut, saved, params, mesh)
    return all(map(torch.equal, tree.leaves(given), tree.leaves(wanted)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_donated_activations(ranks, name):
    assert all(ranks(run_donated, {"X": 2, "Y": 2}, name))


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


@pytest.mark.parametrize("strategy", [*STRATEGIES.values(), pods], ids=[*STRATEGIES, "pods"])
def test_nothing_in_a_layer_waits_that_need_not(strategy):
    """Gathers and reductions are under way when their lines return, and weights' gradients are not even begun."""
    mesh, listing = AbstractMesh({"P": 2, "X": 2, "Y": 2}), strategy.STRATEGY
    types = {key: parse(text) for key, text in strategy.SPECS.items()}
    In, W_in, W_out, Out = (torch.empty(spec.local_shape(SIZES, mesh), device="meta") for spec in types.values())
    weights = [W_in, W_out]
    if listing.gather:
        pending = listing.gather(*weights, mesh)
        assert all(isinstance(W, Pending) for W in pending)
        weights = [W.wait() for W in pending]
    _, saved = listing.layer_forward(*weights, In, mesh, Block())
    _, *products = listing.layer_backward(*weights, Out, saved, mesh, Block())
    assert all(isinstance(product, Deferred) for product in products)
    grads = [product.wait() for product in products]
    for reduce in filter(None, (listing.reduce, listing.reduce_slow)):
        pending = reduce(*grads, mesh)
        assert all(isinstance(dW, Pending) for dW in pending)
        grads = [dW.wait() for dW in pending]
