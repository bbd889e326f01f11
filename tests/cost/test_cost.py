"""Rooflines of a chip, memory, the collectives of GPUs and TPUs, layers under each strategy, by what they must be at
any sizes, and where no chapter has them: the book's numbers are the chapters' answers (book/test_chapters.py). And what
rooflines, collectives, layers, decoding and models refuse."""
# ruff: noqa: F401 - calls in tables name what is imported

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import evaluated, named, refused

from scaling import cost
from scaling.configs import get
from scaling.cost import decoding, gpu, serving
from scaling.cost import transformer as tm
from scaling.cost.lanes import place_axes
from scaling.hardware import Chip, Measured, chip
from scaling.hardware.torus import Torus
from scaling.spec.sizes import parse_mesh

V5E, V5P, H100 = chip("v5e"), chip("v5p"), chip("h100")
C, W = V5E.flops(), V5E.hbm_bw
approx = partial(pytest.approx, rel=1e-6, abs=0)  # seconds a byte are below the usual absolute tolerance
numbers = st.floats(1, 1e15)
EACH = settings(deadline=None, max_examples=20, derandomize=True)
SLOWER, FASTER = 1 - 1e-6, 1 + 1e-6


@EACH
@given(numbers, numbers, numbers, numbers)
def test_bounds_of_a_roofline(flops, nbytes, c, w):
    op = cost.roofline(flops, nbytes, c, w)
    assert op.lower <= op.upper <= 2 * op.lower
    assert (op.bound == "compute") == (op.math >= op.comms)
    if not math.isclose(op.intensity, op.critical, rel_tol=1e-9):
        assert (op.bound == "compute") == (op.intensity > op.critical)
    assert op.attained == approx(cost.attainable(op.intensity, c, w), rel=1e-9)


@EACH
@given(st.integers(300, 20000), st.integers(300, 20000), st.sampled_from(["bf16", "int8", ("bf16", "int8", "bf16")]))
def test_critical_batch_is_where_math_equals_comms(D, F, dtypes):
    B = cost.critical_batch(C, W, D, F, dtypes)
    if math.isfinite(B):
        op = cost.matmul(B, D, F, C, W, dtypes)
        assert op.math == approx(op.comms)
        assert cost.critical_batch(C, W, dtypes=dtypes) < B
    else:
        assert cost.matmul(1e9, D, F, C, W, dtypes).bound == "comms"


def test_bytes_of_matmuls_and_of_memory_by_stages_of_zero():
    op, tiled = cost.matmul(2, 3, 5, C, W), cost.tiled_matmul(256, 512, 128, (64, 128, 32), C, W)
    assert (op.flops, op.nbytes) == (60, 2 * (6 + 15 + 10))
    assert tiled.nbytes == 2 * 4 * 4 * (4 * (64 * 128 + 128 * 32) + 64 * 32)
    by_stage = [cost.training_memory(1e9, X=10, Y=2, zero=stage).total for stage in range(4)]
    assert by_stage == [6e9, 2e9 + 4e8, 1e9 + 5e8, 6e8]
    assert cost.training_memory(1e9, activations=64e9, X=4, Y=2, Z=2, zero=3).total == 12e9 / 16 + 64e9 / 16


# --- GPUs


def test_gathers_of_gpus():
    """Over nodes the sharded axis helps by the nodes that it spans; a node that is half full has half the links;
    without switches few GPUs are slow; tensor parallelism is bound where its gathers take as long as its math."""
    assert gpu.all_gather(1e9, H100, 1) == 0
    assert gpu.all_reduce(1, H100, 8) == 2 * gpu.reduce_scatter(1, H100, 8) == approx(2 * 7 / 8 / 450e9)
    assert gpu.all_reduce(1, H100, 1024, sharp=True) == 1 / 400e9
    for Y in (8, 16, 128):
        assert gpu.all_gather(1, H100, 256 // Y, Y, exact=False) == approx(1 / (Y * 50e9))
    for gpus, inner, seconds in (
        (4, 256, 3 / 4 / 12.8e12),
        (16_384, 1, 31 / 32 / 400e9),  # larger clusters follow by rule
        (12, 1, 2 / 3 / 200e9),  # 4 GPUs lack two thirds
        (12, 4, 5 / 6 / 400e9),
        (3, 4, 2 / 3 / 200e9),
    ):
        assert gpu.all_gather(1, H100, gpus, inner) == approx(seconds)
    assert [gpu.all_gather(1, chip("mi300x"), n) for n in (8, 2)] == approx([7 / 8 / 448e9, 1 / 2 / 64e9])


def test_all_to_all_by_counting():
    """What each GPU, node and unit sends out of itself; if ragged, to k of the GPUs, or above a node of the nodes."""
    for n, k in itertools.product((2, 8, 16, 256, 512), (None, 2)):
        worst = 0.0
        for below, bandwidth in ((1, 450e9), (8, 400e9), (256, 12.8e12)):
            if n > below:
                out = sum(1 / n**2 for a in range(below) for b in range(n) if b // below != a // below)
                worst = max(worst, out / bandwidth * min(1, (k or n) * min(below, 8) / n))
        assert gpu.all_to_all(1, H100, n, k) == approx(worst)


# --- Collectives of TPUs

sides = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=3)
tori = sides.map(lambda each: Torus(*zip(*each, strict=True)))


@EACH
@given(tori)
def test_a_torus_is_its_links_and_an_all_to_all_takes_as_long_as_the_fullest(torus):
    slow = Chip("own", "tpu", axes=3, link_bw=1e9, wrap="none")
    routed = torus.all_to_all_seconds(1e12, 1e9)
    assert cost.all_to_all(1e12, slow, torus.shape, torus.wrap, exact=True) == pytest.approx(routed, rel=1e-9)
    assert cost.all_gather(0, slow, torus.shape, torus.wrap) == pytest.approx(torus.diameter * 1e-6)
    for a in torus.chips():
        assert all(torus.distance(a, b) == 1 or torus.size == 1 for b in torus.neighbours(a))
    distances = [torus.distance(a, b) for a in torus.chips() for b in torus.chips()]
    assert max(distances) == torus.diameter
    assert sum(distances) / torus.size**2 == pytest.approx(torus.mean_distance)
    loads = torus.all_to_all_loads()
    assert sum(loads.values()) == pytest.approx(sum(distances))  # every hop is on some link
    assert set(loads) <= set(torus.links())


def test_gathers_on_a_torus():
    assert [Torus((16, 4), (wrap, False)).bisection_links for wrap in (True, False)] == [8, 4]  # across an even cut
    for axes, exact, seconds in (
        (4, False, 1 / 1.8e11),  # a ring: whatever its length
        (8, True, 7 / 8 / 1.8e11),
        ((4, 8, 4), False, 1 / 5.4e11),
    ):
        assert cost.all_gather(1e9, V5P, axes, exact=exact) == approx(1e9 * seconds)
    assert cost.all_gather(1e9, V5E, 8) == approx(7 / 8 / 45)  # a line
    assert cost.all_gather(1e9, V5E, (8, 16)) == approx(1 / (3 * 45))  # one line, one ring
    for op, f in (("AllGather", cost.all_gather), ("AllReduce", cost.all_reduce), ("AllToAll", cost.all_to_all)):
        assert cost.seconds(op, 1e8, V5P, (4, 4)) == f(1e8, V5P, (4, 4))
    assert cost.seconds("CollectivePermute", 1e8, V5P, 4) == cost.permute(1e8, V5P)
    for op in ("Gather", "Scatter"):  # the root has all blocks but its own on the two links of its ring
        assert 0.75e8 / 1.8e11 <= cost.seconds(op, 1e8, V5P, 4) <= 1e8 / 1.8e11


# --- A layer under each strategy: the ledger of Part 5's algorithms, and what hides behind what

PEAK, RING = V5P.flops(), V5P.ici_bw
LAYER = cost.LayerShape(1e6, 8192, 32768)
TPUS = st.sampled_from(["v4p", "v5p", "v5e", "v6e"]).map(chip)
GPUS = st.sampled_from(["h100", "h800", "b200", "gb200"]).map(chip)
WIDTHS, SIZES, MATRICES = st.integers(256, 100_000), st.integers(2, 64), st.sampled_from([2, 3])


def test_bytes_by_strategy():
    """What the strategies themselves move of a plain layer, plan/test_ledger.py holds; here what is beside it."""
    B, D, F, X, Y = 4096, 512, 2048, 8, 4
    shape = cost.LayerShape(B, D, F)
    for strategy, x, y in (("dp", X, 1), ("fsdp", X, 1), ("tp", 1, Y), ("fsdp_tp", X, Y)):
        ways = [cost.layer_bytes(strategy, shape, x, y, way).values() for way in ("forward", "backward")]
        assert [*cost.layer_bytes(strategy, shape, x, y).values()] == [a + b for a, b in zip(*ways, strict=True)]
        one = cost.layer(strategy, LAYER, cost.Links(PEAK))  # a single chip moves nothing
        assert (one.comms, one.axes, one.bound) == (0, (), "compute")
        assert one.lower == one.upper == one.math == approx(12 * 1e6 * 8192 * 32768 / PEAK)
    assert cost.layer_bytes("tp", shape, 1, Y, "backward", regather=True)["Y"] == 6 * B * D
    assert cost.layer_bytes("fsdp", replace(shape, matrices=3), X, 1, "forward")["X"] == 6 * D * F
    assert cost.layer_bytes("tp", replace(shape, dtype="int8", blocks=2), 1, Y, "forward")["Y"] == 4 * B * D


def test_overlap_models():
    links = cost.Links(PEAK, 2 * RING, RING)
    together, after = (cost.layer("fsdp_tp", LAYER, links, 1024, 8, overlap=way) for way in ("max", "sum"))
    assert together.axes == after.axes
    assert after.comms == approx(sum(t for _, t in after.axes))
    assert together.comms == sum(max(t for _, t in part.axes) for part in together.parts) < after.comms
    assert together.upper == after.upper == approx(after.math + after.comms)
    # What backward communicates does not hide behind forward. DP at 0.8 of its threshold: computing both ways takes 1.2
    # times the AllReduce, but backward alone only 0.8.
    both = cost.layer("dp", replace(LAYER, B=0.8 * 64 * PEAK / RING), cost.Links(PEAK, X=RING), X=64)
    forward, backward = both.parts
    assert both.math == approx(1.2 * both.comms)
    assert (forward.bound, backward.bound, both.bound) == ("compute", "X", "X")
    assert both.math < both.lower == approx(forward.math + backward.comms)


# --- Each threshold is where the functions that it is a threshold of cross


@EACH
@given(TPUS, st.sampled_from([2, 16, (4, 4), (2, 4), (1, 2)]), st.sampled_from([None, True, False]), st.booleans())
def test_latency_bound_bytes(hw, axes, wrap, exact):
    V, least = cost.latency_bound_bytes(hw, axes, wrap, exact), cost.all_gather(0, hw, axes, wrap, exact)
    assert cost.all_gather(SLOWER * V, hw, axes, wrap, exact) == least
    assert cost.all_gather(FASTER * V, hw, axes, wrap, exact) > least


@EACH
@given(TPUS, st.integers(2, 4096), WIDTHS, WIDTHS, MATRICES)
def test_data_threshold_and_tensor_limit(hw, X, D, F, matrices):
    """Of DP and FSDP by tokens a chip, whatever the matrices; of TP by Y, where F is matrices / 2 times as wide."""
    C, W = hw.flops(), hw.bandwidth("ici")
    links, B = cost.Links(C, X=W, Y=W), X * cost.data_threshold(C, W)
    for tokens, bound in ((FASTER * B, "compute"), (SLOWER * B, "X")):
        shape = cost.LayerShape(tokens, D, F, matrices)
        for strategy, direction in (("fsdp", "forward"), ("fsdp", "backward"), ("dp", "backward")):
            assert cost.layer(strategy, shape, links, X=X, direction=direction).bound == bound
    limit, shape = cost.tensor_limit(F * matrices / 2, C, W), cost.LayerShape(1e6, D, F, matrices)
    for Y in {*range(2, 9), max(2, int(limit)), max(2, int(limit) + 1)}:
        assert (cost.layer("tp", shape, links, Y=Y, direction="forward").bound == "compute") == (limit >= Y)


@EACH
@given(SIZES, SIZES, st.integers(1, 2), st.sampled_from(["max", "sum"]), MATRICES)
def test_mixed_threshold_and_optimum(X, Y, m_x, overlap, matrices):
    """At its best X both axes' collectives take the same time, at the threshold that of computing."""
    F, N = 16384, X * Y
    B = X**2 * matrices * F / (2 * N * m_x)  # whose optimum is this X
    assert cost.mixed_optimum(B, F, N, m_x, 1, matrices) == approx(X)
    links = cost.Links(PEAK, m_x * RING, RING)
    forward = cost.layer("fsdp_tp", cost.LayerShape(B, 4096, F, matrices), links, X, Y, "forward", overlap=overlap)
    times = dict(forward.axes)
    assert times["X"] == approx(times["Y"])
    least = cost.mixed_threshold(F, PEAK, m_x * RING, RING, overlap, matrices)
    assert (forward.comms / forward.math) ** 2 == approx(least / (B / N))
    assert forward.comms == approx(times["X"] * (1 if overlap == "max" else 2))


@EACH
@given(GPUS, SIZES, st.integers(1, 16))
def test_gpu_data_threshold_and_expert_min_width(hw, nodes, k):
    """The book's V/W between nodes is over all of them; a part (X - 1)/X leaves a node, and 1 - 1/G a GPU inside it."""
    inside = hw.flops() * gpu.all_gather(1, hw, hw.node_gpus)
    between = hw.intensity("scale-out") * (nodes - 1) / nodes
    assert gpu.data_threshold(hw, nodes) == approx(max(inside, between))
    assert gpu.data_threshold(hw, nodes, 4) == approx(between / 4)
    assert gpu.data_threshold(hw) >= gpu.data_threshold(hw, nodes)
    Z = nodes * hw.node_gpus
    F = gpu.expert_min_width(Z, k, hw)
    assert gpu.expert_layer(1e6, 4096, FASTER * F, Z, k, hw).bound == "compute"
    assert gpu.expert_layer(1e6, 4096, SLOWER * F, Z, k, hw).bound == "Z"
    Y = gpu.tensor_limit_across(28_672, H100)
    assert approx(4 * (Y / 8 - 1) / (Y / 8 * 400e9)) == 4 * 28_672 / (Y * 9.9e14)


L70 = get("llama3-70b")
NODE = replace(H100, levels=H100.levels[:1])
CIRCLE = Torus((4,), (True,))
BOX = Chip("box", "cpu", measured=(Measured("AllGather", 2, 1, 1e9),))


def layer(strategy="fsdp", shape=None, links=None, **options):
    """A layer of Part 5, of which something is another."""
    shape = {"B": 1e6, "D": 8192, "F": 32768} | (shape or {})
    return cost.layer(strategy, cost.LayerShape(**shape), cost.Links(**{"C": C} | (links or {})), **options)


def form_of(text):
    """Of "heads Y=2,Z=2"."""
    form, sizes = text.split()
    return decoding.check_form(form, L70, parse_mesh(sizes))


def changed(**change):
    return L70.with_(**change)


# what is asked for: what is said
REFUSED = named(r"""
call                                                    words of its error
cost.roofline(-1, 1, C, W)                              flops = -1
cost.roofline(1, 1, 0, W)                               C = 0
cost.matmul(0, 1, 1, C, W)                              B = 0
cost.matmul(1, 1, 1, C, W, 'bf17')                      unknown dtype
cost.matmul(1, 1, 1, C, W, ('bf16', 'bf16'))            one dtype, or three
cost.critical_batch(C, W, 4096)                         F = None
cost.attainable(-1, C, W)                               intensity = -1
cost.tiled_matmul(256, 512, 128, (100, 128, 32), C, W)  tiles (100, 128, 32) do not divide (256, 512, 128)
cost.training_memory(1e9, zero=4)                       zero = 4
cost.training_memory(1e9, activations=-1)               activations = -1
cost.seconds_at(1, 1, C, 1.5)                           mfu
# GPUs
gpu.all_gather(-1, H100, 8)                             nbytes = -1
gpu.all_gather(1, H100, 0)                              gpus = 0
gpu.all_gather(1, H100, 8, inner=3)                     8 x 3 GPUs of h100 do not fill
gpu.all_gather(1, V5E, 8)                               v5e (tpu) has no levels
gpu.all_to_all(1, H100, 8, k=0)                         k = 0
gpu.data_threshold(NODE)                                nothing is known of its network beyond the node
cost.expert_inflation(4, 8)                             active = 8 of 4 experts
gpu.expert_layer(1e6, 7168, 2048, 12, 4, H100)          Z = 12: experts over several nodes take whole ones
# collectives
CIRCLE.distance((0,), (4,))                             no chip
Torus((4, 4), (True,))                                  one length and one bool
Torus((3,), (True,)).bisection_links                    no even cut
CIRCLE.all_to_all_seconds(-1, 1)                        bytes are not negative
cost.seconds('Gossip', 1e8, V5P, 4)                     op = 'Gossip': one of 'AllGather'
cost.seconds('AllToAll', 1, BOX, 2)
    AllToAll over 2 ranks was not measured (there is: AllGather over 2)
cost.point_to_point(1, V5E, 2, ports=5)                 v5e has 4 links
cost.point_to_point(1, V5E, 0)                          hops = 0
cost.all_gather(-2, V5P, 4)                             nbytes = -2
cost.all_to_all(-3, V5P, 4)                             nbytes = -3
cost.all_reduce(math.nan, V5P, 4)                       nbytes = nan
cost.all_gather(1, V5E, (4, 4), wrap=(True,))           one for each of the 2 axes
# layers
layer('zero', X=2)                                      strategy = 'zero': one of 'dp', 'fsdp', 'tp', 'fsdp_tp'
layer('dp', {'B': -1})                                  B = -1: must be a positive number
layer('dp', {'D': True})                                D = True
layer('dp', X=2.5)                                      X = 2.5: must be a whole number
layer('dp', Y=2)                                        dp has no axis Y\n  fix: use fsdp_tp
layer('tp', X=2)                                        tp has no axis X
layer(X=2)                                              fsdp moves bytes over X\n  fix: give Links(X=...)
layer(X=2, links={'X': 0})                              W_X = 0: must be a positive number
layer(overlap='mean')                                   overlap = 'mean': one of 'max', 'sum'
layer(direction='up')                                   direction = 'up'
layer(links={'C': math.inf})                            C = inf
# decoding and serving
form_of('heads Y=2,Z=2')                                the axis Z
form_of('sequence X=2')                                 the axis X
form_of('heads Y=128')                                  N = 64 does not divide over 128
form_of('heads Y=3')                                    N = 64 does not divide over 3
form_of('heads E=4')                                    experts over chips, of a model without
form_of('experts Y=2')                                  of a model without\n  fix: use other axes
form_of('ring Y=2')                                     form = 'ring'
place_axes((4, 4), {'Y': 8})                            idle
place_axes((4, 4), {'Y': 3, 'Z': 5})                    Y = 3 does not fit
serving.Load(weights=0, params=1)                       weights = 0
serving.Load(weights=1, params=1, kv_token=-1)          kv_token = -1
serving.step(serving.Load(1, 1), 0, 1, V5E)             batch = 0
serving.smallest_slice(1e15, V5E)                       fit no slice of v5e: the largest is 16x16
# models
tm.forward_flops(L70, 2.5, 1)                           B = 2.5: must be a whole number
tm.forward_flops(L70, 0, 1)                             B = 0: must be
tm.train_flops(L70, 1, 1, remat='some')                 remat = 'some': one of 'none'
tm.forward_flops(L70, 1, 8, 4, causal=True)             at least as many keys
tm.einsum_flops('ab,bc->ac', (2, 3), (4, 5))            b is both 3 and 4
tm.einsum_flops('ab->d', (2, 3))                        the result has d
get('llama9')                                           unknown model 'llama9'
changed(K=7)                                            must divide N=64
changed(D=-1)                                           D is -1: must be in [1, 1e9]
changed(theta=0.0)                                      theta is 0.0: must be in (0, inf)
changed(dropout=1.0)                                    dropout is 1.0: must be in [0, 1)
changed(activation='swish')
    activation is 'swish': must be one of None, 'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2'
changed(window=0)                                       a window is a whole number
changed(window=(3, None))                               window has 2 entries for L=80
changed(rope_scaling={'type': 'linear'})                'linear' lacks its factor
""")
test_what_rooflines_collectives_layers_decoding_and_models_refuse = refused(evaluated(REFUSED, globals()))
