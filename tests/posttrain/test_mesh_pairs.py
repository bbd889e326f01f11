"""Drawn pairs of a training and a serving mesh: weights arrive to the bit by as few bytes as can be, and the losses are
those of one device."""

import random
from functools import cache

import numpy
import pytest
import torch
from grpo import EXPERTS, SIZES, STEP, plain, run, write_folder
from problems import same
from runs import records

from scaling import tree
from scaling.collectives.transfer import plan_transfer
from scaling.configs import Config
from scaling.models import transformer
from scaling.posttrain.loop import LoopOptions, meshes_of, push_lines, push_weights
from scaling.serve import types as served
from scaling.spec import parse
from scaling.spec.sizes import format_sizes
from scaling.strategies import transformer as strategies
from scaling.trace import trace
from scaling.train.settings import Settings

RANKS = 8
CONFIGS = {
    "dense": Config("dense", 2, 16, 24, 4, 2, 8, 32),
    "tied": Config("tied", 2, 16, 24, 4, 4, 8, 32, tied=True, qk_norm=True),
    "experts": Config("experts", 2, 16, 24, 4, 2, 8, 32, E=4, k=2, aux_coef=0.0),
}


def drawn_pairs(count: int, seed: int = 67) -> list[tuple[str, dict, dict, bool]]:
    """Draw (model, training mesh, serving mesh, whether apart), each of at most `RANKS` ranks in all."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        model = rng.choice([*CONFIGS])
        train, serve = (
            {axis: rng.choice((1, 2, 2, 4)) for axis in rng.sample(axes, rng.randint(1, 3))}
            for axes in (("PXCYE" if model == "experts" else "PXCY"), ("YZCE" if model == "experts" else "YZC"))
        )
        sizes, apart = [int(numpy.prod([*mesh.values()])) for mesh in (train, serve)], rng.random() < 0.5
        if (sum(sizes) if apart else max(sizes)) <= RANKS and max(sizes) > 1:
            found[str((model, train, serve, apart))] = (model, train, serve, apart)
    return [*found.values()]


PAIRS = drawn_pairs(20)
NAMES = [f"{model} {format_sizes(a)} to {format_sizes(b)}{' apart' * c}" for model, a, b, c in PAIRS]


def push_and_compare(mesh, pairs) -> list[tuple[int, int]]:
    """Push drawn params on each pair, check what arrives, and return (bytes sent, bytes of the plan) of this rank."""
    found = []
    for name, train, serve, apart in pairs:
        config, meshes = CONFIGS[name], meshes_of(LoopOptions(train, serve, apart), mesh)
        params = transformer.init(config, 0, torch.float64)
        held = strategies.shard(params, config, meshes.train) if meshes.train.member else None
        with trace() as log:
            arrived = push_weights(held, Settings(config, "", ""), meshes)
        moved = [event for event in log.events if event.op == "Transfer"]
        sent = sum(event.wire_bytes for event in moved)
        came = sum(event.nbytes for event in moved) - sent
        planned = lacked = 0
        for where, line, shape in push_lines(config, meshes.train, meshes.serve):
            plan = plan_transfer(line, shape, meshes.train, meshes.serve)
            planned += 8 * sum(m.numel for m in plan if m.source == mesh.rank != m.target)
            ours, theirs = (parse(text) for text in line.split(" -> "))
            index = torch.arange(tree.named_leaves(params)[where].numel()).view(shape)
            has, needs = (
                {*(tree.shard(index, str(spec), one).flatten().tolist() if one.member else [])}
                for spec, one in ((ours, meshes.train), (theirs, meshes.serve))
            )
            lacked += 8 * len(needs - has)
        if meshes.serve.member:
            wanted = tree.shard(params, served.specs(config, meshes.serve), meshes.serve)
            assert same(arrived, wanted)
        else:
            assert arrived is None
        assert (sent, came) == (planned, lacked), (name, train, serve, apart)
        found.append((sent, came))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [PAIRS[:5], pytest.param(PAIRS, marks=pytest.mark.sweep)], ids=["few", "all"])
def test_weights_arrive_to_the_bit_by_the_planned_bytes(ranks, pairs):
    for one in zip(*ranks(push_and_compare, {"W": RANKS}, pairs), strict=True):
        sent, came = (sum(each) for each in zip(*one, strict=True))
        assert sent == came


@cache
def plain_losses(sizes: str, steps: int):
    return plain(*write_folder(sizes), steps)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=pytest.mark.sweep if i >= 2 else ()) for i, pair in enumerate(PAIRS)], ids=NAMES
)
def test_steps_on_drawn_meshes_are_those_of_one_device(tmp_path, monkeypatch, pair):
    monkeypatch.chdir(tmp_path)
    model, train, serve, apart = pair
    sizes = EXPERTS if model == "experts" else SIZES
    write_folder(sizes)
    meshes = f"--train-mesh '{format_sizes(train)}' --serve-mesh '{format_sizes(serve)}' {'--apart' * apart}"
    assert run(f"{STEP} --steps 3 --out run {meshes}") == 0
    for record, wanted in zip(records("run"), plain_losses(sizes, 3), strict=True):
        assert (record["loss"], record["reward"]) == pytest.approx(wanted, rel=0, abs=1e-12)
        assert record["gap_max"] < 1e-12
