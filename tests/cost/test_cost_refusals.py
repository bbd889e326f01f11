"""What rooflines, collectives, layers, decoding and models refuse."""
# ruff: noqa: F401 - calls in tables name what is imported

import math
from dataclasses import replace

from refused import evaluated, refused

from scaling import cost
from scaling.configs import get
from scaling.cost import decoding, gpu, serving
from scaling.cost import transformer as tm
from scaling.cost.lanes import place_axes
from scaling.hardware import Chip, Measured, chip
from scaling.hardware.torus import Torus
from scaling.spec.sizes import parse_mesh

V5E, V5P, H100, L70 = chip("v5e"), chip("v5p"), chip("h100"), get("llama3-70b")
NODE = replace(H100, levels=H100.levels[:1])
C, W = V5E.flops(), V5E.hbm_bw
RING = Torus((4,), (True,))
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


REFUSED = {  # what is asked for: what is said
    "cost.roofline(-1, 1, C, W)": "flops = -1", "cost.roofline(1, 1, 0, W)": "C = 0",
    "cost.matmul(0, 1, 1, C, W)": "B = 0", "cost.matmul(1, 1, 1, C, W, 'bf17')": "unknown dtype",
    "cost.matmul(1, 1, 1, C, W, ('bf16', 'bf16'))": "one dtype, or three",
    "cost.critical_batch(C, W, 4096)": "F = None", "cost.attainable(-1, C, W)": "intensity = -1",
    "cost.tiled_matmul(256, 512, 128, (100, 128, 32), C, W)": "tiles (100, 128, 32) do not divide (256, 512, 128)",
    "cost.training_memory(1e9, zero=4)": "zero = 4", "cost.training_memory(1e9, activations=-1)": "activations = -1",
    "cost.seconds_at(1, 1, C, 1.5)": "mfu",
    # GPUs
    "gpu.all_gather(-1, H100, 8)": "nbytes = -1", "gpu.all_gather(1, H100, 0)": "gpus = 0",
    "gpu.all_gather(1, H100, 8, inner=3)": "8 x 3 GPUs of h100 do not fill",
    "gpu.all_gather(1, V5E, 8)": "v5e (tpu) has no levels", "gpu.all_to_all(1, H100, 8, k=0)": "k = 0",
    "gpu.data_threshold(NODE)": "nothing is known of its network beyond the node",
    "cost.expert_inflation(4, 8)": "active = 8 of 4 experts",
    "gpu.expert_layer(1e6, 7168, 2048, 12, 4, H100)": "Z = 12: experts over several nodes take whole ones",
    # collectives
    "RING.distance((0,), (4,))": "no chip", "Torus((4, 4), (True,))": "one length and one bool",
    "Torus((3,), (True,)).bisection_links": "no even cut", "RING.all_to_all_seconds(-1, 1)": "bytes are not negative",
    "cost.seconds('Gossip', 1e8, V5P, 4)": "op = 'Gossip': one of 'AllGather'",
    "cost.seconds('AllToAll', 1, BOX, 2)": "AllToAll over 2 ranks was not measured (there is: AllGather over 2)",
    "cost.point_to_point(1, V5E, 2, ports=5)": "v5e has 4 links", "cost.point_to_point(1, V5E, 0)": "hops = 0",
    "cost.all_gather(-2, V5P, 4)": "nbytes = -2", "cost.all_to_all(-3, V5P, 4)": "nbytes = -3",
    "cost.all_reduce(math.nan, V5P, 4)": "nbytes = nan",
    "cost.all_gather(1, V5E, (4, 4), wrap=(True,))": "one for each of the 2 axes",
    # layers
    "layer('zero', X=2)": "strategy = 'zero': one of 'dp', 'fsdp', 'tp', 'fsdp_tp'",
    "layer('dp', {'B': -1})": "B = -1: must be a positive number", "layer('dp', {'D': True})": "D = True",
    "layer('dp', X=2.5)": "X = 2.5: must be a whole number", "layer('dp', Y=2)": "dp has no axis Y\n  fix: use fsdp_tp",
    "layer('tp', X=2)": "tp has no axis X", "layer(X=2)": "fsdp moves bytes over X\n  fix: give Links(X=...)",
    "layer(X=2, links={'X': 0})": "W_X = 0: must be a positive number",
    "layer(overlap='mean')": "overlap = 'mean': one of 'max', 'sum'", "layer(direction='up')": "direction = 'up'",
    "layer(links={'C': math.inf})": "C = inf",
    # decoding and serving
    "form_of('heads Y=2,Z=2')": "the axis Z", "form_of('sequence X=2')": "the axis X",
    "form_of('heads Y=128')": "N = 64 does not divide over 128",
    "form_of('heads Y=3')": "N = 64 does not divide over 3",
    "form_of('heads E=4')": "experts over chips, of a model without",
    "form_of('experts Y=2')": "of a model without\n  fix: use other axes", "form_of('ring Y=2')": "form = 'ring'",
    "place_axes((4, 4), {'Y': 8})": "idle", "place_axes((4, 4), {'Y': 3, 'Z': 5})": "Y = 3 does not fit",
    "serving.Load(weights=0, params=1)": "weights = 0",
    "serving.Load(weights=1, params=1, kv_token=-1)": "kv_token = -1",
    "serving.step(serving.Load(1, 1), 0, 1, V5E)": "batch = 0",
    "serving.smallest_slice(1e15, V5E)": "fit no slice of v5e: the largest is 16x16",
    # models
    "tm.forward_flops(L70, 2.5, 1)": "at least 1, got 2.5", "tm.forward_flops(L70, 0, 1)": "at least 1, got 0",
    "tm.train_flops(L70, 1, 1, remat='some')": "unknown remat 'some'",
    "tm.forward_flops(L70, 1, 8, 4, causal=True)": "at least as many keys",
    "tm.utilization(L70, 3, 1, 0.5, 4, 1e9, S=6)": "training=False",
    "tm.einsum_flops('ab,bc->ac', (2, 3), (4, 5))": "b is both 3 and 4",
    "tm.einsum_flops('ab->d', (2, 3))": "the result has d", "get('llama9')": "unknown model 'llama9'\n  fix: ",
    "changed(K=7)": "must divide N=64", "changed(D=-1)": "D is -1: must be in [1, 1e9]",
    "changed(theta=0.0)": "theta is 0.0: must be in (0, inf)",
    "changed(dropout=1.0)": "dropout is 1.0: must be in [0, 1)",
    "changed(activation='swish')":
        "activation is 'swish': must be one of None, 'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2'",
    "changed(window=0)": "a window is a whole number", "changed(window=(3, None))": "window has 2 entries for L=80",
    "changed(rope_scaling={'type': 'linear'})": "'linear' lacks its factor",
}  # fmt: skip
test_refused = refused(evaluated(REFUSED, globals()))
