"""The strategies of Part 5 against one device: loss, gradients, params after AdamW steps."""

import pytest
import torch
from mlp_problem import BLOCKS, MESHES, SIZES, STRATEGIES, B, L, close, one_device, specs, whole

from scaling import optim, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.strategies import fsdp, pods
from scaling.strategies.stack import Block
from scaling.trace import trace

CASES = [(name, mesh, BLOCKS[0]) for name, meshes in MESHES.items() for mesh in meshes]
CASES += [(name, MESHES[name][0 if name == "fsdp_tp" else 1], BLOCKS[1]) for name in MESHES]
CASES += [("fsdp_tp", MESHES["fsdp_tp"][0], block) for block in BLOCKS[2:]]  # the layers share their activations
CASES = [(*case, 0) for case in CASES] + [("pods", {"P": 2, "X": 2, "Y": 2}, BLOCKS[0], layers) for layers in (1, 2)]


def run_steps(mesh, name, dtype, block, layers):
    """`layers`: how many of them a bucket holds."""
    strategy, (params, batches) = (STRATEGIES | {"pods": pods})[name], whole(dtype)
    types = strategy.SPECS
    params = tree.shard(params, specs(strategy), mesh)
    bucket = layers * tree.nbytes(params) // L
    adamw, losses, first = optim.adamw(0.01), [], None
    state = adamw.init(params)
    for In, target in batches:
        In, target = tree.shard([In, target], [types["In"], types["Out"]], mesh)
        before = In.clone(), tree.map(torch.clone, params)
        Out, saved = strategy.forward(params, In, mesh, *block)
        losses.append((Out - target).square().sum() / B)  # Loss[] {U}: this rank's terms
        dIn, grads = strategy.backward(2 / B * (Out - target), saved, params, mesh, bucket_bytes=bucket)
        assert torch.equal(before[0], In), "the input was changed"
        assert all(map(torch.equal, tree.leaves(before[1]), tree.leaves(params))), "the params were changed"
        tree.check(grads, specs(strategy), SIZES, mesh, dtype)
        if first is None:
            first = tree.unshard(grads, specs(strategy), mesh), tree.unshard(dIn, types["In"], mesh)
        params, state = adamw.update(grads, state, params)
    return torch.stack(losses), *first, tree.unshard(params, specs(strategy), mesh)


def label(value):
    if isinstance(value, tuple):
        return value[0] + "-residual-norm" * value[1]
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "block", "layers"), CASES, ids=label)
def test_equal_to_one_device(ranks, name, mesh, block, layers):
    both = layers or (block == BLOCKS[0] and AbstractMesh(mesh).size() == (4 if name == "fsdp_tp" else 2))
    for dtype in (torch.float64, torch.float32) if both else (torch.float64,):
        wanted = one_device(dtype, block)
        results = ranks(run_steps, mesh, name, dtype, block, layers)
        close(sum(result[0] for result in results), torch.stack(wanted[0]), dtype)
        for result in results:
            close(result[1], wanted[1], dtype)
            close(result[2], wanted[2], dtype)
            close(result[3], wanted[3], dtype)


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


def run_microbatches(mesh, name):
    strategy, (params, batches) = STRATEGIES[name], whole(torch.float64)
    params = tree.shard(params, specs(strategy), mesh)
    In, dOut = tree.shard(list(batches[0]), [strategy.SPECS["In"], strategy.SPECS["Out"]], mesh)
    _, saved = strategy.forward(params, In, mesh)
    _, once = strategy.backward(dOut, saved, params, mesh)
    _, sums = strategy.backward(dOut, saved, params, mesh, reduce=False)
    _, twice = strategy.backward(dOut, saved, params, mesh, partial=sums)
    close(twice, tree.map(lambda g: 2 * g, once), torch.float64)
    return all(twice[name].data_ptr() == sums[name].data_ptr() for name in sums)


@pytest.mark.parametrize(("name", "mesh"), [("data_parallel", {"X": 2}), ("tensor_parallel", {"Y": 2})])
def test_gradients_that_are_whole_take_the_place_of_their_partial_sums(ranks, name, mesh):
    assert all(ranks(run_microbatches, mesh, name))


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
