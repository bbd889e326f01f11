import math
from itertools import product

import pytest

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Fixed, Job, Layout, evaluate, plans, search, tree
from scaling.plan.candidates import CHUNKS, TIE, rank, simplest_first
from scaling.plan.job import AXES, POLICIES
from scaling.plan.network import Unplaced

H100, V5P = chip("h100"), chip("v5p")
L8, L70 = get("llama3-8b"), get("llama3-70b")
SMALL = L8.with_(L=6, V=32000)
EXPERTS = get("mixtral-8x7b").with_(L=4)


def every_layout(job: Job, chips: int):
    """All there are, by trying every size of every axis and every recipe; those that a tree cannot hold are left
    out."""
    w = job.work
    divisors = [d for d in range(1, chips + 1) if chips % d == 0]
    for sizes in product(divisors, repeat=len(AXES) - 1):
        if math.prod(sizes) != chips:
            continue
        mesh = dict(zip(AXES, (1, *sizes), strict=True))
        replicas = mesh["data"] * mesh["fsdp"] * mesh["expert"]
        if (
            w.heads % mesh["tensor"]
            or w.experts_count % mesh["expert"]
            or mesh["pipe"] > w.L
            or replicas > job.sequences
        ):
            continue
        if mesh["context"] > 1 and job.seq < 256 * mesh["context"]:
            continue
        own = -(-job.sequences // replicas)
        for zero, m, schedule, chunks, remat, reduce in product(
            (1, 3),
            range(1, own + 1),
            ("1f1b", "interleaved", "zb-h1", "dualpipev"),
            (1, *CHUNKS),
            POLICIES,
            ("each", "once"),
        ):
            stages, layers = mesh["pipe"], -(-w.L // mesh["pipe"])
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "chips", "sequences"),
    [
        pytest.param(SMALL, 8, 6, marks=pytest.mark.sweep),
        (SMALL, 12, 6),
        pytest.param(SMALL, 16, 3, marks=pytest.mark.sweep),
        pytest.param(EXPERTS, 8, 4, marks=pytest.mark.sweep),
        (EXPERTS, 4, 4),
        (SMALL, 4, 1),
    ],
)
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
            best = min(best, one.forecast)
    assert len(every) > 500 or sequences == 1
    found = plans(job, H100, chips)
    assert {layout for _, layout in found.layouts()} <= every  # none that cannot run
    assert min(found[0].forecast, found[1].forecast) == pytest.approx(best)  # no layout is faster
    assert found[0].forecast <= (1 + TIE) * best  # what comes first may be simpler


def test_the_order_of_what_is_found():
    job = Job(L70, 2**20)
    found = plans(job, H100, 64)
    ranks = [rank(one) for one in found]
    assert ranks[1:] == sorted(ranks[1:])
    assert ranks[0][1] <= (1 + TIE) * ranks[1][1]
    assert all(one.chips == 64 for one in found)
    assert sum(one.fits for one in found) == found.fitting
    assert len({(tuple(layout.sizes.values()), layout.zero) for _, layout in found.layouts()}) == len(found)


def test_of_layouts_as_fast_and_as_simple_the_one_comes_first_that_needs_overlap_least():
    keys = [(0.0, 1.00, 5.0, 1.0), (0.0, 1.01, 4.0, 1.0), (0.0, 2.0, 3.0, 1.0), (1.0, 0.5, 1.0, 9.0)]
    chosen = [(key, None, Layout(data=8)) for key in keys]
    assert [key for key, *_ in simplest_first(chosen)] == [keys[1], keys[0], *keys[2:]]


# --- Jobs that people know


REMAT_OF = {  # policy: (model, sizes, sequences, their tokens) for which it is the best
    "none": ("llama3-8b", (("tensor", 8),), 8, 8192),  # all is held
    "attention": ("llama3-8b", (("fsdp", 8),), 8, 10_752),  # "none" just does not fit
    "matmuls": ("llama3-70b", (("fsdp", 8), ("tensor", 8)), 128, 8192),
    "block": ("llama3-70b", (("fsdp", 8), ("tensor", 8)), 8, 32768),  # nothing else fits
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_best_remat_policy_is_chosen(policy):
    """All policies are tried, and what fits comes before speed."""
    model, axes, sequences, seq = REMAT_OF[policy]
    job, chips = Job(get(model), sequences * seq, seq), 64 if len(axes) > 1 else 8
    fixed = {name: plans(job, H100, chips, Fixed(axes, remat=name))[0] for name in POLICIES}
    best = min(POLICIES, key=lambda name: (not fixed[name].fits, fixed[name].forecast))
    assert (best, fixed[best].fits) == (policy, True)
    assert fixed["none"].fits == (policy in ("none", "matmuls"))
    assert plans(job, H100, chips, Fixed(axes))[0].layout.remat == policy


def test_part_6_llama3_70b_on_a_pod():
    job = Job(L70, 4 * 2**20)
    found = plans(job, V5P, 8960)
    first = found[0]
    assert first.size("tensor") in (4, 8, 16)
    assert first.size("fsdp") * first.size("data") * first.size("context") >= 560  # X_opt = 1618
    assert first.cost.bound == "compute"
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


# --- What is fixed, and what is refused


def test_reasons_are_counted():
    found = search(Job(L8, 2**20), H100, 24)
    assert any("lie across nodes of 8" in reason for reason in found.refused)
    assert found.layouts > len(found.found)


def test_what_is_fixed_stays():
    job = Job(L70, 2**20)
    for found in plans(job, H100, 64, Fixed((("tensor", 4), ("pipe", 2)), "block", schedule="zb-h1", zero=1)):
        layout = found.layout
        assert (layout.tensor, layout.pipe, layout.remat, layout.schedule, layout.zero) == (4, 2, "block", "zb-h1", 1)
    assert plans(Job(L70, 2**22), V5P, 8192, Fixed(pods=4))[0].size("pod") == 4
    once = plans(job, H100, 64, Fixed((("fsdp", 8),), microbatches=2, zero=3, reduce="once"))
    assert {layout.reduce for _, layout in once.layouts()} == {"once"}
