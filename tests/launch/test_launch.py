"""Ranks that are started here: their meshes, their results, and what does not start any."""

import ctypes
import os
import sys
import threading
import time
from multiprocessing import util
from unittest.mock import Mock

import pytest
import torch
from machine import be_rank, total
from refused import evaluated, refused

from scaling.collectives import all_gather
from scaling.launch import RankError, can_fork, fit_mesh, parse_mesh, run
from scaling.launch.ranks import ready_to_fork
from scaling.spec import ShardingError


def test_ranks_get_arguments_return_results_and_leave_nothing_behind(tmp_path, monkeypatch):
    """Closures too; results in rank order. What lay in a file while they run would stay behind if their parent were
    killed. A first collective takes each 0.05 s of a processor, which other programs on the machine hardly change; no
    rank imports anything, for its first gradient neither."""
    ready_to_fork()  # the compiler makes a folder
    monkeypatch.setattr("scaling.launch.ranks.ready_to_fork", ready := Mock(wraps=ready_to_fork))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = []  # a rank changes its own copy

    def f(mesh, factor, shift):
        here.append(mesh.rank)
        before = set(sys.modules)
        whole = all_gather("A[I_XY] -> A[I]", torch.tensor([mesh.rank * factor + shift]), mesh)
        took = time.process_time()
        torch.func.vjp(torch.sin, torch.ones(2))[1](torch.ones(2))
        around = mesh.checked, torch.get_num_threads(), os.environ["WORLD_SIZE"], [*tmp_path.iterdir()]
        large = torch.full((300_000,), float(mesh.rank))
        return mesh.rank, mesh.coord, whole, took, around, sorted(set(sys.modules) - before), large

    results = run(f, {"X": 4, "Y": 2}, 10, 1)
    ready.assert_called_once()
    for number, (rank, coord, whole, took, around, imported, large) in enumerate(results):
        assert (rank, coord) == (number, {"X": number // 2, "Y": number % 2})
        assert torch.equal(whole, torch.arange(8) * 10 + 1)
        assert took < 0.5
        assert (around, imported) == ((True, 1, "8", []), [])
        assert torch.equal(large, torch.full((300_000,), float(rank)))
    assert (here, len(results), [*tmp_path.iterdir()]) == ([], 8, [])


def test_one_rank_runs_here():
    assert run(lambda mesh: (os.getpid(), mesh.size()), {"X": 1, "Y": 1}) == [(os.getpid(), 1)]
    with pytest.raises(KeyError, match="mine"):  # as it is: there is no other rank to tell of
        run(lambda mesh: {}["mine"], {"X": 1})


NO_MESH = {
    **{f"run(total, {sizes})": "a mesh is given by the sizes of its axes" for sizes in ((("X", 0), ("Y", 2)), 4, None)},
    "run(total, {'X': 0, 'Y': 2})": "axis X has size 0", "parse_mesh('')": "cannot read ''",
    "parse_mesh('X=4,')": "cannot read ''", "parse_mesh('X=-1')": "cannot read 'X=-1'",
    "parse_mesh('X:4')": "cannot read 'X:4'\n  fix: write axes and sizes as in X=4,Y=2",
    "parse_mesh('X=4,X=2')": "axis X is given twice", "parse_mesh('XY=4')": "'XY' cannot name a mesh axis",
}  # fmt: skip
test_sizes_that_make_no_mesh = refused(evaluated(NO_MESH, globals()), ShardingError)


def test_a_rank_cannot_start_ranks(monkeypatch):
    words = "ShardingError: launch.run cannot start 2 ranks from a process that is a rank itself\n"
    with pytest.raises(RankError, match=words):
        run(lambda mesh: run(total, {"X": 2}), {"X": 2})
    be_rank(monkeypatch, size=4)
    with pytest.raises(ShardingError, match=r"2 ranks in each of torchrun's 4 \(WORLD_SIZE=4\)\n  fix: launch\.start"):
        run(total, {"X": 2})


def test_ranks_may_use_threads_after_their_parent_did():
    """A forked process inherits OpenMP's record of threads that it does not have."""

    def product(mesh):
        x = torch.full((600, 600), 1.0)
        return torch.get_num_threads(), (x @ x).sqrt().mean().item()

    torch.set_num_threads(2)
    try:
        assert product(None) == (2, pytest.approx(600**0.5))
        assert [threads for threads, _ in run(product, {"X": 2}, threads=2)] == [2, 2]
        assert product(None)[0] == 2  # and so may the parent, after
    finally:
        torch.set_num_threads(1)


def test_meshes_are_parsed_and_fitted_to_torchruns_ranks(monkeypatch):
    assert [*parse_mesh(" Y = 4 , X=2,data=3 ").items()] == [("Y", 4), ("X", 2), ("data", 3)]
    for world, fitted in {1: (4, 2), 4: (2, 2), 2: (1, 2), 16: (8, 2), 3: (4, 2)}.items():
        be_rank(monkeypatch, size=world)
        assert tuple(fit_mesh({"X": 4, "Y": 2}).values()) == fitted


def pulled(mesh):
    x = torch.ones(3, requires_grad=True)
    (mesh.rank + x).square().sum().backward()
    return x.grad.sum().item()


def spawned_by_a_fork(path, arguments, descriptors, spawn=util.spawnv_passfds) -> int:
    """A spawned process, which is sent what it runs, but need not import torch first."""
    if arguments[-1] != "--multiprocessing-fork":
        return spawn(path, arguments, descriptors)
    if pid := os.fork():
        return pid
    sys.argv = arguments[-2:]
    try:
        exec(arguments[-2])
    except SystemExit as end:
        os._exit(end.code)
    finally:
        os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize("really", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_after_a_gradient_beside_gpus_ranks_are_spawned(really, monkeypatch):
    """autograd's threads are named so; torch refuses gradients in a process forked from one that has them."""
    done, begun = threading.Event(), threading.Event()
    if not really:
        monkeypatch.setattr(util, "spawnv_passfds", spawned_by_a_fork)

    def named():
        ctypes.CDLL(None).prctl(15, b"pt_autograd_0")  # PR_SET_NAME
        begun.set()
        done.wait()

    thread = threading.Thread(target=named)
    thread.start()
    begun.wait()
    try:
        assert not can_fork("cpu")
        assert run(pulled, {"X": 2}) == [6.0, 12.0]
        with pytest.raises(ValueError, match=r"cannot be given to ranks: (?s:.*)fix: define it at the top"):
            run(lambda mesh: done, {"X": 2})
    finally:
        done.set()
        thread.join()
    end = time.monotonic() + 10
    while not can_fork("cpu"):  # a thread that was joined may be listed a moment longer
        assert time.monotonic() < end
