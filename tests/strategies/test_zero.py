"""ZeRO-1 and 2, and the buckets in which gradients are reduced: equal to one device, with the same bytes."""

import pytest
import torch
from mlp_problem import AG, AR, BLOCKS, RS, SIZES, B, D, F, L, close, counts, one_device, whole

from scaling import optim, tree
from scaling.mesh import AbstractMesh
from scaling.strategies import data_parallel, fsdp, zero
from scaling.strategies import layers as engine
from scaling.strategies.layers import _room, layers_a_bucket
from scaling.trace import trace


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


@pytest.mark.parametrize(("layers", "made"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (99, [3])])
def test_a_buffer_holds_the_layers_of_one_bucket(layers, made, monkeypatch):
    mesh, counted = AbstractMesh({"X": 2}), []
    monkeypatch.setattr(engine, "_room", lambda like, shape, *how: counted.append(shape) or _room(like, shape, *how))
    params = {"W_in": torch.empty(L, D // 2, F, device="meta"), "W_out": torch.empty(L, F, D // 2, device="meta")}
    In = torch.empty(B // 2, D, device="meta")
    Out, saved = fsdp.forward(params, In, mesh)
    fsdp.backward(Out, saved, params, mesh, bucket_bytes=layers * 2 * 4 * D // 2 * F)
    assert counted == [(count, *shape) for count in made for shape in ((D, F), (F, D))]


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


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("dim", range(4))
def test_the_blocks_that_a_reduction_scatters_lie_in_one_piece(dim, together):
    """Those of all layers, or of each layer alone."""
    room = _room(torch.empty(0), (2, 3, 4, 5), dim, together)
    assert room.shape == (2, 3, 4, 5)
    assert (room.movedim(dim, 0 if together else 1) if dim else room).is_contiguous()
