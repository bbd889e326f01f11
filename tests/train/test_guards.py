"""Guards: what is planted is found and named; runs in which nothing is planted are left alone."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from machine import on_ranks, once
from runs import ONE, TINY

from scaling import tree
from scaling.collectives import all_reduce
from scaling.mesh import AbstractMesh
from scaling.strategies import transformer
from scaling.trace import trace
from scaling.train import guards
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import drawn_params, make_step

SMALL = Settings(TINY, "", "", 4, 16)


@pytest.mark.parametrize(("mesh", "leaf", "rank", "words"), [
    ({"X": 2, "Y": 2}, "norm_mlp", 3, r'step 7: params\["layers"\]\["norm_mlp"\].*over [XY]+, but rank 3 of 4'),
    ({"P": 2, "Y": 2}, "W_in", 2, r'params\["layers"\]\["W_in"\].*is replicated over P, but rank 2 of 4'),
    ({"X": 2}, "W_in", 1, ""),  # sharded: only this rank has it
])  # fmt: skip
def test_replicas_that_have_come_apart_are_named(mesh, leaf, rank, words):
    """On one rank one element is off by its last bit."""
    types, params = transformer.specs(TINY, mesh), drawn_params(SMALL, mesh)
    if mesh.rank == rank:
        flat = (params["layers"] | params)[leaf].view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
    with pytest.raises(ArithmeticError, match=words) if words else nullcontext():
        guards.check_replicas(params, types, mesh, 7, "params")


def test_a_batch_on_the_cpu_is_looked_at_beside_a_state_on_another_device(monkeypatch):
    seen = []
    monkeypatch.setattr(guards, "everyone", lambda x, mesh: seen.append(x.device.type) or torch.ones(1, 2))
    typed = [("t", torch.zeros(2), "t[B]"), ("W", torch.zeros(2, dtype=torch.int64, device="meta"), "W[D]")]
    assert guards.not_finite(typed, SimpleNamespace(device=torch.device("meta"))) == [[], []]
    assert seen == ["meta"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_a_digest_tells_every_bit_and_place(dtype):
    n = 5 * guards.ROW + 7
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    x = x > 0 if dtype == torch.bool else x.to(dtype)
    said = guards.digest(x)
    for i, j in {(0, n - 1), (n // 2 - 1, n - 3), (n - 2, n - 3)}:
        flipped, swapped = x.clone(), x.clone()
        flipped[i] = ~x[i] if dtype == torch.bool else -x[i]  # the highest bit of a word
        swapped[i], swapped[j] = x[j], x[i]
        assert guards.digest(flipped) != said
        assert (guards.digest(swapped) == said) == (x[i] == x[j])
    assert guards.digest(torch.cat([x[:1], x])[1:]) == said  # wherever it lies in memory


def test_what_is_finite():
    inf, half = float("inf"), torch.float16
    for good in (torch.full((9,), 3e38), torch.full((9,), 6e4, dtype=half), torch.tensor([1, 2]), torch.zeros(0)):
        assert guards.finite(good)  # also where a sum is not
    for bad in ([1.0, float("nan"), 2.0], [1.0, inf], [-inf], [inf, -inf]):
        assert not guards.finite(torch.tensor(bad))
    with pytest.raises(ArithmeticError, match=r'step 4: state\["W"\], W\[D\], is not finite on ranks \[0\]'):
        guards.check_replicas({"W": torch.ones(2) / 0}, {"W": "W[D]"}, ONE, 4)


def test_two_that_have_come_apart_along_different_axes():
    mesh = AbstractMesh({"X": 2, "Y": 3})
    assert guards.apart([1, 1, 1, 1, 1, 2], "W[D]", mesh) == ([5], ["X"])
    assert guards.apart([1, 2, 3, 1, 9, 3], "W[D_Y]", mesh) == ([4], ["X"])
    assert guards.apart([1, 1, 2, 4, 4, 4], "W[D_X]", mesh) == ([2], ["Y"])


@on_ranks({"X": 2})
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_what_is_not_finite_is_named_before_it_is_learnt(mesh, dtype):
    """Also where no scale of the loss helps."""
    settings, rows = replace(SMALL, dtype=dtype), torch.ones(2, 16, dtype=torch.int64)
    params, optimizer = drawn_params(settings, mesh), optimizer_of(settings)
    if mesh.rank == 1:
        params["layers"]["W_out"].view(-1)[0] = float("nan")
    before, step = tree.map(torch.clone, params), make_step(settings, mesh, optimizer)
    with pytest.raises(ArithmeticError, match=r'step 1: the loss is nan.*grads\["embed"\] on ranks \[0, 1\]'):
        step(params, optimizer.init(params), (rows, rows, None), donate=True)
    torch.testing.assert_close(params, before, rtol=0, atol=0, equal_nan=True)


def test_a_jump_of_the_loss_is_told_from_noise():
    g, losses, falling = torch.Generator().manual_seed(0), guards.Losses(), guards.Losses()
    for step in range(400):
        assert losses.jump(2 + 3 * 0.98**step + 0.1 * torch.randn((), generator=g).item(), step) == ""
    assert "step 400: the loss jumped to 4.0000; the median of the 8 before is 2" in losses.jump(4.0, 400)
    assert losses.jump(2.0, 401) == ""
    assert not any(falling.jump(6 * 0.95**step, step) for step in range(30))
    assert "jumped to 6.0000" in falling.jump(6.0, 30)


@on_ranks({"X": 2})
def test_a_slow_rank_is_named_by_all(mesh):
    """Ten steps of 20 ms of work and a collective; rank 1 works longer."""

    def named():
        kept = guards.Pace()
        for _ in range(10):
            began = time.perf_counter()
            with trace() as log:
                time.sleep(0.02 + mesh.rank * 0.05)
                all_reduce("x[] {U_X} -> x[]", torch.ones(()), mesh)
            kept.add(time.perf_counter() - began, guards.still(log))
        said = kept.slow(mesh, 11)
        assert "step 11: rank 1 (X=1) is slow" in said
        assert "rank 0" not in said

    once(named)  # all ranks are told the same, and try again together


def test_stages_have_their_own_pace():
    mesh = AbstractMesh({"Z": 2, "X": 2})
    assert guards.slow_ranks([1.0, 1.0, 1.5, 1.5], 1.6, mesh, 3) == []
    (only,) = guards.slow_ranks([1.0, 1.0, 1.5, 1.9], 2.0, mesh, 3)
    assert only.startswith("step 3: rank 3 (Z=1, X=1) is slow: it works 1900 ms a step, its peers 1500 ms")
    assert guards.slow_ranks([1.0], 1.0, AbstractMesh({"X": 1}), 3) == []
    assert guards.slow_ranks([0.002, 0.002, 0.006], 0.006, AbstractMesh({"X": 3}), 3) == []  # a few ms are noise
