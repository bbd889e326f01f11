"""A slow rank is named, by how long it works while its peers wait; numbers of a step's progress."""

import json
import time

import pytest
from busy import once

from scaling.collectives import all_reduce
from scaling.configs import get
from scaling.cost import transformer as tm
from scaling.mesh import AbstractMesh, Mesh
from scaling.trace import trace
from scaling.train import pace
from scaling.train.progress import Progress
from scaling.train.settings import Settings


def steps(mesh, slow, seconds):
    """Ten steps of 20 ms of work and a collective; one rank works longer."""
    import torch

    kept = pace.Pace()
    for _ in range(10):
        began = time.perf_counter()
        with trace() as log:
            time.sleep(0.02 + (seconds if mesh.rank == slow else 0))
            all_reduce("x[] {U_X} -> x[]", torch.ones(()), mesh)
        kept.add(time.perf_counter() - began, pace.still(log))
    return kept.slow(mesh, 11)


def test_a_slow_rank_is_named_by_all(ranks):
    def named():
        for said in ranks(steps, {"X": 2}, 1, 0.05):
            assert "step 11: rank 1 (X=1) is slow" in said
            assert "rank 0" not in said

    def none():
        assert ranks(steps, {"X": 2}, 1, 0.0) == ["", ""]

    once(named)
    once(none)


def test_stages_have_their_own_pace():
    mesh = AbstractMesh({"Z": 2, "X": 2})
    assert pace.slow_ranks([1.0, 1.0, 1.5, 1.5], 1.6, mesh, 3) == []
    (only,) = pace.slow_ranks([1.0, 1.0, 1.5, 1.9], 2.0, mesh, 3)
    assert only.startswith("step 3: rank 3 (Z=1, X=1) is slow: it works 1900 ms a step, its peers 1500 ms")
    assert pace.slow_ranks([1.0], 1.0, AbstractMesh({"X": 1}), 3) == []
    assert pace.slow_ranks([0.002, 0.002, 0.006], 0.006, AbstractMesh({"X": 3}), 3) == []  # a few ms are noise


def test_flops_by_both_conventions_and_the_share_of_the_chip(tmp_path, capsys):
    config = get("tiny")
    settings = Settings(config, "", str(tmp_path), batch=8, seq=64, dtype="bf16", chip="h100")
    progress = Progress(settings, Mesh({"X": 1}))
    record = progress.record(3, 1.5, 0.25, 0.5, 0.1)
    assert record["flops_per_second"] == 6 * tm.num_params(config) * 8 * 64 / 0.5
    matmuls = tm.num_params(config) - config.D * config.V - (2 * config.L + 1) * config.D  # no look-up, no norms
    attention = 12 * config.L * config.N * config.H * 64
    assert record["flops_per_second_with_attention"] == (6 * matmuls + attention) * 8 * 64 / 0.5
    assert record["mfu"] == pytest.approx(record["flops_per_second"] / 990e12, rel=0.01)
    assert record["exposed"] == 0.2
    progress.say(record)
    assert "step      3/200  loss 1.5000  norm 0.25  1,024 tokens/s  MFU 0.0%" in capsys.readouterr().out
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == record
