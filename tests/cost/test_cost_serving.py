import itertools
import math
from collections import Counter

import pytest
import torch

from scaling import serve
from scaling.configs import Config, Latent, get
from scaling.cost import decoding as d
from scaling.cost import serving as s
from scaling.cost import transformer as tm
from scaling.cost.lanes import place_axes
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.spec.sizes import parse_mesh
from scaling.trace import trace

approx = pytest.approx
V5E, H100, L70 = chip("v5e"), chip("h100"), get("llama3-70b")


SMALL = Config("small", 2, 64, 96, 16, 4, 8, 80)
DENSE = "heads Y=8; heads Y=2; heads_batch Y=4,Z=2; heads_batch Y=2,Z=4; sequence Y=4,Z=2; sequence Y=1,Z=8"
SPREAD = "; 2d X=2,Y=4; 2d X=4,Y=8; 2d X=2,Y=2,Z=2"
OVER_E = "; heads Y=1,E=4; heads Y=2,E=2; experts Y=1,E=4; experts Y=2,E=2; experts Y=4,E=1"
STEPS = (
    (SMALL, DENSE + SPREAD),
    (SMALL.with_(gated=False), DENSE + SPREAD),
    (SMALL.with_(K=16, latent=Latent(q_rank=24, kv_rank=20, nope=6, rope=4, value=8)), DENSE),
    (SMALL.with_(E=4, k=2), DENSE + OVER_E),
)


@pytest.mark.parametrize(("config", "on"), [(config, on) for config, each in STEPS for on in each.split("; ")])
def test_what_a_decode_step_runs(config, on):
    """The collectives of scaling.serve.decode, traced on an abstract mesh: op, axes, V, how often."""
    form, sizes = on.split()[0], parse_mesh(on.split()[1])
    mesh = AbstractMesh(sizes)
    params = model.init(config, mesh=mesh, specs=serve.specs(config, mesh, form=form))
    cache = serve.init_cache(config, 8, 64, mesh=mesh, form=form)
    with trace() as log:
        serve.decode(params, torch.empty(8, dtype=torch.int64, device="meta"), cache, config, mesh, form=form)
    wanted, found = Counter(), Counter()
    for event in log.collectives():
        if axes := "".join(axis for axis in sorted(event.axes) if sizes[axis] > 1):
            wanted[event.op, axes, event.nbytes] += 1
    for moved in d.collectives(form, config, 8, sizes, dtype="fp32"):
        found[moved.op, "".join(axis for axis in moved.axes if sizes.get(axis, 1) > 1), moved.nbytes] += moved.times
    assert found == wanted


def test_on_a_slice():
    """Axes fill it. What a slice without wraparound takes, plan/test_serve.py has; were 4x4 lines rings, an AllReduce
    were two passes of V over four links."""
    for shape in ((4, 4), (4, 8), (2, 4, 4)):
        chips = math.prod(shape)
        for y in (2**i for i in range(chips.bit_length())):
            placed = place_axes(shape, {"Y": y, "Z": chips // y})
            assert math.prod(placed["Y"]) == y
            assert tuple(a * b for a, b in zip(*placed.values(), strict=True)) == shape
    moved, tiny = d.StepCollective("AllReduce", "X", "Y", 1e9, 1), d.StepCollective("AllGather", "X", "Z", 1, 10)
    node, both = d.StepCollective("AllReduce", "X", "Y", 8e9, 3), {"Y": 8, "Z": 2}
    for given, seconds in (
        ((moved, V5E, (4, 4), {"Y": 16}, True), 2e9 / (4 * 4.5e10)),
        ((moved, V5E, (16, 16), {"Y": 256}), 2e9 / (4 * 4.5e10)),
        ((tiny, V5E, (4, 4), both), 10 * 1e-6),  # one hop each
        ((node, H100, (8,), {"Y": 8}), 3 * 2 * 8e9 * 7 / 8 / 450e9),
        ((tiny, H100, (16,), both), 10 * 2e-5),
    ):
        assert d.collective_seconds(*given) == approx(seconds)
    assert s.slices(V5E) == [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    assert s.slices(H100, 8) == [(1,), (2,), (4,), (8,)]


# Serving by brute force: caches counted by element, experts enumerated, fronts tried one by one


def test_a_cache_is_counted_head_by_head():
    config = get("llama3-8b").with_(window=(4,) * 8 + (None,) * 24)
    for context in (1, 4, 5, 100):
        elements = sum(2 * config.K * config.H * min(context, window or context) for window in config.windows)
        assert s.load(config, kv="int8").kv(context) == elements
        assert s.load(config, kv="fp32").kv(context) == 4 * elements


def test_what_a_step_is_bound_by():
    load = s.load(L70, "int8", "int8")
    assert [s.step(load, batch, 1, V5E, 8).bound for batch in (1, 1024)] == ["weights", "compute"]
    slow = s.step(load, 1, 1, V5E, 8, comms=1.0)
    assert (slow.bound, slow.seconds, slow.apart) == ("collectives", slow.kv + 1.0, slow.kv + slow.weights + 1.0)


def test_a_pass_over_prompts_and_decodes():
    """Of decodes alone it is their step; a prompt's FLOPs are a forward pass's, causal, with all its logits."""
    load = s.load(L70, "int8", "int8")
    assert s.mixed(load, [(1, 4096)] * 32, V5E, 8) == s.step(load, 32, 4096, V5E, 8)
    prompt = s.mixed(load, [(4096, 4096)], V5E, 8)
    flops = tm.forward_flops(L70, 1, 4096, causal=True)
    norms = 2 * 4096 * (160 * 8192 + 8192)  # counted as params here
    assert prompt.kv == approx(flops["attention"] / (8 * 1.97e14))
    assert prompt.math * 8 * 1.97e14 == approx(sum(flops.values()) - flops["attention"] + norms)
    both = s.mixed(load, [(2, 300), (1, 50)], V5E, 8)
    assert both.kv == approx((300 + 50) * 163_840 / (8 * 8.2e11))
    assert both.math == approx(3 * 2 * load.params / (8 * 1.97e14))


@pytest.mark.parametrize(("E", "k", "batch"), [(4, 1, 3), (4, 2, 2), (3, 3, 2)])
def test_experts_read_are_enumerated(E, k, batch):
    """The mean number of different experts over all routings."""
    each = list(itertools.combinations(range(E), k))
    routings = list(itertools.product(each, repeat=batch))
    mean = sum(len(set(itertools.chain(*routing))) for routing in routings) / len(routings)
    load = s.Load(weights=100.0 + E, params=1.0, experts=float(E), E=E, k=k)
    assert load.read(batch) == approx(100 + mean)


def test_a_front_is_what_nothing_beats():
    points = [(3, 1), (1, 1), (2, 4), (2, 5), (4, 4), (5, 6), (5, 6)]
    front = s.pareto(points, lambda p: p[0], lambda p: p[1])
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] >= p[1]}
    assert front == sorted({*points} - beaten)


def test_servers_keep_pace():
    """10 sequences are ready after 100 steps, 2 s, and take 5 s of prefill."""
    assert s.prefill_servers(0.5, 0.02, 10, 100) == 2.5
