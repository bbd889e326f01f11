"""Every layout of so many chips, the planner's beside all there are, and where their meshes lie on the chips."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from scaling.configs import get
from scaling.cost import gpu
from scaling.cost.lanes import AxisSpan, exchange, gather_price, join_spans
from scaling.hardware import chip
from scaling.plan import Fixed, Job, Layout, evaluate, plans, search
from scaling.plan.candidates import rank
from scaling.plan.classes import is_unusual, usual_error
from scaling.plan.job import AXES, POLICIES, SCHEDULES
from scaling.plan.network import Unplaced, book, measured, placements, slice_shape, torus, torus_meshes, tree
from scaling.plan.published import own_mesh, published_runs
from scaling.plan.recipes import CHUNKS
from scaling.plan.ties import TIE, effort, simplest_first

H100, V5P = chip("h100"), chip("v5p")
L8, L70 = get("llama3-8b"), get("llama3-70b")
SMALL = L8.with_(L=6, V=32000)
EXPERTS = get("mixtral-8x7b").with_(L=4)
LONG = [pytest.param(*case, marks=pytest.mark.sweep) for case in ((SMALL, 8, 6), (SMALL, 16, 3), (EXPERTS, 8, 4))]


def every_layout(job: Job, chips: int):
    """All there are, by trying every size of every axis and every recipe; those that a tree cannot hold are left
    out."""
    w = job.work
    divisors = [d for d in range(1, chips + 1) if chips % d == 0]
    for sizes in product(divisors, repeat=len(AXES) - 1):
        if math.prod(sizes) != chips:
            continue
        mesh = dict(zip(AXES, (1, *sizes), strict=True))
        replicas, stages = mesh["data"] * mesh["fsdp"] * mesh["expert"], mesh["pipe"]
        divides = not (w.heads % mesh["tensor"] or w.experts_count % mesh["expert"])
        long_enough = mesh["context"] == 1 or job.seq >= 256 * mesh["context"]
        if not (divides and long_enough and stages <= w.L and replicas <= job.sequences):
            continue
        own, layers = -(-job.sequences // replicas), -(-w.L // stages)
        for zero, m, schedule, chunks, remat, reduce in product(
            (1, 3), range(1, own + 1), SCHEDULES, (1, *CHUNKS), POLICIES, ("each", "once")
        ):
            if (zero == 1 and mesh["fsdp"] > 1) or (zero == 3 and mesh["fsdp"] * mesh["context"] * mesh["expert"] == 1):
                continue
            if (schedule != "1f1b" and stages == 1) or (schedule in ("1f1b", "zb-h1")) != (chunks == 1):
                continue
            if schedule == "interleaved" and (m % stages or chunks > layers):
                continue
            if schedule == "dualpipev" and (chunks != 2 or m < 2 * stages or layers < 2):
                continue
            yield Layout(
                **mesh, zero=zero, microbatches=m, schedule=schedule, chunks=chunks, remat=remat, reduce=reduce
            )


def assert_as_columns(found):
    """Each is chosen by numbers from columns of many layouts, which are its own."""
    for (key, *_), one in zip(found.chosen, found, strict=True):
        assert key == pytest.approx(rank(one), rel=1e-12)
    assert all(one.bound <= one.forecast and one.bound <= one.worst for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "chips", "sequences"), [(SMALL, 12, 6), (EXPERTS, 4, 4), (SMALL, 4, 1), *LONG])
def test_the_best_of_every_layout_is_the_planners(config, chips, sequences):
    job = Job(config, sequences * 2048, 2048)
    best, networks, every = math.inf, {}, set()
    for layout in every_layout(job, chips):
        key = (tuple(layout.sizes.values()), layout.zero)
        if key not in networks:
            try:
                networks[key] = tree(H100, layout.sizes, layout.zero, max(1, job.work.copies), job.work.groups)
            except Unplaced:
                networks[key] = None
        if networks[key] is None:
            continue
        every.add(layout)
        one = evaluate(job, networks[key], layout)
        if one.fits:
            best = min(best, rank(one)[1])
    assert len(every) > 500 or sequences == 1
    found = plans(job, H100, chips)
    assert {layout for _, layout in found.layouts()} <= every  # none that cannot run
    assert min(rank(found[0])[1], rank(found[1])[1]) == pytest.approx(best)  # none is faster, as far as is sure
    assert rank(found[0])[1] <= (1 + usual_error(job, H100)) * best  # what comes first may be simpler
    assert [*map(rank, found[1:])] == sorted(map(rank, found[1:]))
    assert_as_columns(found)
    assert sum(one.fits for one in found) == found.fitting
    assert len({(tuple(layout.sizes.values()), layout.zero) for _, layout in found.layouts()}) == len(found)


def test_of_layouts_as_fast_and_as_simple_the_one_comes_first_that_needs_overlap_least():
    keys = [(0.0, 1.00, 5.0, 1.0), (0.0, 1.01, 4.0, 1.0), (0.0, 2.0, 3.0, 1.0), (1.0, 0.5, 1.0, 9.0)]
    chosen = [(key, None, Layout(data=8)) for key in keys]
    assert [key for key, *_ in simplest_first(chosen)] == [keys[1], keys[0], *keys[2:]]
    long = Job(L70, 2**23, 2**17)  # forecast 0.7% faster with sequences in 64 parts, beyond the node
    assert {axis: n for axis, n in plans(long, H100, 64)[0].layout.sizes.items() if n > 1} == {"fsdp": 8, "context": 8}


# --- Jobs that people know

REMAT = [  # the policy that is best for a model, sizes, sequences, their tokens
    ("none", L8, (("tensor", 8),), 8, 8192),  # all is held
    ("attention", L8, (("fsdp", 8),), 8, 10_752),  # "none" just does not fit
    ("matmuls", L70, (("fsdp", 8), ("tensor", 8)), 128, 8192),
    ("block", L70, (("fsdp", 8), ("tensor", 8)), 8, 65536),  # nothing else fits
]


@pytest.mark.parametrize(("policy", "config", "axes", "sequences", "seq"), REMAT)
def test_the_best_remat_policy_is_chosen(policy, config, axes, sequences, seq):
    """All policies are tried, and what fits comes before speed."""
    assert {case[0] for case in REMAT} == {*POLICIES}
    job, chips = Job(config, sequences * seq, seq), math.prod(size for _, size in axes)
    fixed = {name: plans(job, H100, chips, Fixed(axes, remat=name))[0] for name in POLICIES}
    best = min(POLICIES, key=lambda name: (not fixed[name].fits, fixed[name].forecast))
    assert (best, fixed[best].fits) == (policy, True)
    assert fixed["none"].fits == (policy in ("none", "matmuls"))
    assert plans(job, H100, chips, Fixed(axes))[0].layout.remat == policy


def test_a_layout_that_no_published_run_has_must_be_faster_by_more_than_its_class_is_off():
    job, off = Job(L70, 2**20, 8192), usual_error(Job(L70, 2**20), H100)
    found = plans(job, H100, 64)
    for i, layout in list(found.layouts())[:100]:
        rare = bool(is_unusual(job, H100, layout))
        assert rank(found[i])[1] == pytest.approx(found[i].forecast * (1 + 3 * off * rare))
    assert not is_unusual(job, H100, found[0].layout)
    fastest = min(found[i].forecast for i in range(found.fitting))
    assert found.faster is None or found.faster.forecast == pytest.approx(fastest)
    assert found[0].forecast < fastest * (1 + 3 * off) * (1 + off)


@pytest.mark.parametrize("run", published_runs(), ids=lambda run: run.name)
def test_a_published_layout_is_usual(run):
    sizes = dict.fromkeys(AXES, 1) | dict(run.mesh)
    schedule = dict(run.recipe).get("schedule", "1f1b")
    layout = Layout(**sizes, zero=3 if sizes["fsdp"] > 1 else 1, schedule=schedule)
    assert not is_unusual(run.job, run.chip, layout)


@pytest.mark.slow
def test_the_choice_for_published_jobs_is_theirs_or_simpler_or_faster_by_more_than_its_class_is_off():
    """All but two, whose activations were offloaded to the hosts (MaxText's recipes of GPT-3 and 405B on v6e)."""
    other = []
    for run in (run for run in published_runs() if not run.compared):
        own, best = own_mesh(run), search(run.job, run.chip, run.chips).found[0]
        gain = own.forecast / best.forecast - 1
        simpler = effort(best.layout.sizes, run.chip) <= effort(own.layout.sizes, run.chip) and gain > -TIE
        if best.name != own.name and not simpler and gain < usual_error(run.job, run.chip):
            other.append(run.name)
    assert other == ["GPT3 175B v6e-256", "L3.1 405B 2xv6e-256"]


def test_what_no_published_run_has():
    dense, sparse = Job(L70, 2**20), Job(EXPERTS, 2**20)
    for job, name, layout, unusual in (
        (dense, "v5p", Layout(pipe=4), True),
        (dense, "v5p", Layout(context=2), True),
        (replace(dense, seq=2**17), "v5p", Layout(fsdp=8, context=8, zero=3), False),
        (sparse, "v5p", Layout(expert=8), True),
        (sparse, "v5p", Layout(fsdp=8, zero=3), False),
        (sparse, "h100", Layout(fsdp=8, zero=3), True),
        (sparse, "h100", Layout(pipe=4, expert=8, schedule="dualpipev", chunks=2), False),
        (dense, "h100", Layout(pipe=4, tensor=8), False),
        (dense, "h100", Layout(pipe=4, tensor=2), True),  # stages inside one node
        (dense, "h100", Layout(pipe=4, tensor=8, schedule="zb-h1"), True),
        (dense, "h100", Layout(fsdp=4, tensor=16, zero=3), True),
        (dense, "h100", Layout(fsdp=8, context=2, zero=3), True),
        (replace(dense, seq=2**17), "h100", Layout(fsdp=8, context=2, zero=3), False),
    ):
        assert bool(is_unusual(job, chip(name), layout)) == unusual, (name, layout.name)


def test_part_6_llama3_70b_on_a_pod():
    found = plans(Job(L70, 4 * 2**20), V5P, 8960)
    first = found[0]
    assert first.size("tensor") in (4, 8, 16)
    assert first.size("fsdp") * first.size("data") * first.size("context") >= 560  # X_opt = 1618
    assert found.faster.cost.bound == "compute"  # with short sequences in parts, as no published run on TPUs has them
    assert first.forecast < 1.12 * found.faster.forecast
    i = next(i for i, layout in found.layouts() if layout.shards == 8960)
    assert found[i].cost.bound == "fsdp"  # the book: FSDP alone is communication-bound on 8,960 chips
    for _, network, _ in found.chosen[:50]:
        assert network.lanes["tensor"].ranks == network.sizes["tensor"]


@pytest.mark.parametrize(("on", "chips"), [*((H100, n) for n in (500, 12, 7)), *((V5P, n) for n in (1, 7, 32))])
def test_chips_of_any_number(on, chips):
    job = Job(L8, 2**22, 8192) if on == H100 else Job(L8.with_(L=2, V=1000), 2**20)
    found = plans(job, on, chips)
    assert found[0].fits
    for one in found[:20]:
        assert one.chips == chips
        assert one.bound >= one.cost.math / (1 - one.bubble) * (1 - 1e-12)


def test_what_is_fixed_stays_and_reasons_are_counted():
    job = Job(L70, 2**20)
    for schedule, remat in zip(SCHEDULES, POLICIES, strict=True):
        found = plans(job, H100, 64, Fixed((("tensor", 4), ("pipe", 2)), remat, schedule=schedule, zero=1))
        for _, one in found.layouts():
            assert (one.tensor, one.pipe, one.remat, one.schedule, one.zero) == (4, 2, remat, schedule, 1)
        assert_as_columns(found)
    assert plans(Job(L70, 2**22), V5P, 8192, Fixed(pods=4))[0].size("pod") == 4
    once = plans(job, H100, 64, Fixed((("fsdp", 8),), microbatches=2, zero=3, reduce="once"))
    assert {layout.reduce for _, layout in once.layouts()} == {"once"}
    every = search(Job(L8, 2**20), H100, 24)
    assert any("lie across nodes of 8" in reason for reason in every.refused)
    assert every.layouts > len(every.found)


# --- A mesh on a torus, or on a tree of switches

approx = partial(pytest.approx, rel=1e-9, abs=0)  # seconds a byte are below the usual absolute tolerance


def sizes(**given):
    return dict.fromkeys(AXES, 1) | given


def test_half_of_a_ring_is_a_line_and_its_rest_is_slow():
    """Of whole axes an AllGather is the book's, whose forms stand in cost/test_cost.py."""
    inner, outer = AxisSpan(0, 8, 1, False, False), AxisSpan(0, 2, 8, True, False)
    assert gather_price(V5P, [inner])[0] == approx(7 / 8 / 9e10)  # links one way
    assert gather_price(V5P, [outer])[0] == approx(8 / 1.8e11)  # eight groups share each link
    assert join_spans([inner, outer]) == (AxisSpan(0, 16, 1, True, True),)
    rest = AxisSpan(1, 20, 1, True, True)
    assert gather_price(V5P, [outer, rest]) == approx(((2 / 40) * 8 / 1.8e11 + 1 / 1.8e11, 18e-6))  # the least
    mixed = [AxisSpan(0, 16, 1, True, True), AxisSpan(1, 4, 1, False, True)]
    assert exchange(chip("v5e"), mixed)[0] == approx(16 / 4 / (2 * chip("v5e").link_bw))  # the ring's hops are longest


def test_slices_and_placements_lie_on_the_torus():
    given = {8960: (16, 20, 28), 4096: (16, 16, 16), 7: (1, 1, 7)}
    assert {chips: slice_shape(V5P, chips) for chips in given} == given
    with pytest.raises(ValueError, match="8,950 chips are not a slice of a 16x20x28 pod of v5p; fix: take 8,"):
        slice_shape(V5P, 8950)
    axes, limits = ("fsdp", "tensor"), (8960, 64)
    found = placements(V5P, (16, 20, 28), axes, limits)
    for placed in found:
        for axis, limit in zip(axes, limits, strict=True):
            spans = placed.get(axis, ())
            assert math.prod(s.size for s in spans) <= limit
            assert sum(not s.whole for s in spans) <= 1
        for i, length in enumerate((16, 20, 28)):
            here = sorted((s for spans in placed.values() for s in spans if s.torus == i), key=lambda s: s.stride)
            assert math.prod(s.size for s in here) == length
            assert [s.stride for s in here] == [1, here[0].size][: len(here)]
    lengths = {math.prod(s.size for s in placed.get("tensor", ())) for placed in found}
    dividing = {d for d in range(1, 65) if any(L % d == 0 for L in (16, 20, 28))}
    assert lengths == dividing | {32, 40, 48, 56, 60, 64} & lengths
    ((mesh, placed),) = torus_meshes(V5P, 7, 1, ("fsdp",), (7,))
    assert (mesh, placed) == ({"fsdp": 7}, {"fsdp": (AxisSpan(placed["fsdp"][0].torus, 7, 1, False, True),)})


def test_lanes_of_a_torus_and_of_a_tree():
    placed = {
        "fsdp": (AxisSpan(0, 16, 1, True, True), AxisSpan(1, 16, 1, True, True)),
        "tensor": (AxisSpan(2, 4, 1, False, False),),
    }
    network = torus(V5P, sizes(fsdp=256, tensor=4), 3, placed)
    assert network.lanes["weights"].seconds(1e9) == approx(1e9 / 3.6e11)
    assert 2 * network.lanes["tensor"].seconds(1e9) == approx(2e9 * 3 / 4 / 9e10)
    assert network.lanes["weights"].seconds(1.0) == approx(16e-6)  # hops
    assert network.lanes["weights"].links == (True, True, False, False)
    pods = torus(V5P, sizes(pod=2, fsdp=256, tensor=4), 3, placed)
    assert 2 * pods.lanes["pod"].seconds(1e9) == approx(2e9 / 6.25e9)
    ideal = book(V5P, sizes(fsdp=256, tensor=4), {"fsdp": 2, "tensor": 1})
    assert ideal.lanes["tensor"].seconds(1e9) == approx(1e9 / 1.8e11)
    # of a tree
    network = tree(H100, sizes(pipe=2, fsdp=4, tensor=8), 3)
    assert network.lanes["tensor"].seconds(1e9) == approx(1e9 * 7 / 8 / 450e9)
    assert network.lanes["weights"].seconds(1e9) == approx(8e9 * 3 / 4 / 400e9)  # 8 groups, one node
    assert network.lanes["pipe"].seconds(1e9) == approx(1e9 / 50e9)
    assert network.lanes["tensor"].links[0]
    assert network.lanes["weights"].links[1]
    with pytest.raises(Unplaced, match="groups of 6 GPUs lie across nodes of 8"):
        tree(H100, sizes(data=4, tensor=6), 1)
    with pytest.raises(Unplaced, match="AllGather over 2 ranks was not measured"):
        measured(H100, sizes(data=2), 1)
    tree(H100, sizes(tensor=6), 1)  # all there is: 6 of a node's GPUs


def test_experts_over_nodes_send_a_token_once_to_each():
    tokens, D, copies = 4096, 7168, 8
    inside = tree(H100, sizes(expert=8), 1, copies=8).lanes["expert"]
    assert inside.seconds(2 * tokens * D) == approx(2 * tokens * D * 8 * 7 / 8 / 450e9)
    meshed = tree(chip("mi300x"), sizes(expert=2, tensor=2), 1, copies=2).lanes["expert"]  # four GPUs, no switches
    assert meshed.seconds(1e9) == approx(2e9 / 2 / (3 * 64e9))
    across = tree(H100, sizes(expert=64), 1, copies, groups=64).lanes["expert"]
    layer = gpu.expert_layer(64 * tokens, D, 2048, 64, copies, H100)
    assert 2 * across.seconds(2 * tokens * D) == approx(layer.comms)
    limited = tree(H100, sizes(expert=64), 1, copies, groups=4).lanes["expert"]
    assert limited.per_byte == approx(across.per_byte / 2)
