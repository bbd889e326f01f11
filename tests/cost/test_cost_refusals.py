"""What rooflines, collectives, layers, decoding and models refuse."""

import math
from dataclasses import replace

from refused import by_words, refused

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
    return lambda: decoding.check_form(form, L70, parse_mesh(sizes))


def changed(**change):
    return lambda: L70.with_(**change)


REFUSED = {  # what is said: what is asked for
    "flops = -1": lambda: cost.roofline(-1, 1, C, W),
    "C = 0": lambda: cost.roofline(1, 1, 0, W),
    "B = 0": lambda: cost.matmul(0, 1, 1, C, W),
    "unknown dtype": lambda: cost.matmul(1, 1, 1, C, W, "bf17"),
    "one dtype, or three": lambda: cost.matmul(1, 1, 1, C, W, ("bf16", "bf16")),
    "F = None": lambda: cost.critical_batch(C, W, 4096),
    "intensity = -1": lambda: cost.attainable(-1, C, W),
    "tiles (100, 128, 32) do not divide (256, 512, 128)":
        lambda: cost.tiled_matmul(256, 512, 128, (100, 128, 32), C, W),
    "zero = 4": lambda: cost.training_memory(1e9, zero=4),
    "activations = -1": lambda: cost.training_memory(1e9, activations=-1),
    "mfu": lambda: cost.seconds_at(1, 1, C, 1.5),
    # GPUs
    "nbytes = -1": lambda: gpu.all_gather(-1, H100, 8),
    "gpus = 0": lambda: gpu.all_gather(1, H100, 0),
    "8 x 3 GPUs of h100 do not fill": lambda: gpu.all_gather(1, H100, 8, inner=3),
    "v5e (tpu) has no levels": lambda: gpu.all_gather(1, V5E, 8),
    "k = 0": lambda: gpu.all_to_all(1, H100, 8, k=0),
    "nothing is known of its network beyond the node": lambda: gpu.data_threshold(NODE),
    "active = 8 of 4 experts": lambda: cost.expert_inflation(4, 8),
    "Z = 12: experts over several nodes take whole ones": lambda: gpu.expert_layer(1e6, 7168, 2048, 12, 4, H100),
    # collectives
    "no chip": lambda: RING.distance((0,), (4,)),
    "one length and one bool": lambda: Torus((4, 4), (True,)),
    "no even cut": lambda: Torus((3,), (True,)).bisection_links,
    "bytes are not negative": lambda: RING.all_to_all_seconds(-1, 1),
    "op = 'Gossip': one of 'AllGather'": lambda: cost.seconds("Gossip", 1e8, V5P, 4),
    "AllToAll over 2 ranks was not measured (there is: AllGather over 2)": lambda: cost.seconds("AllToAll", 1, BOX, 2),
    "v5e has 4 links": lambda: cost.point_to_point(1, V5E, 2, ports=5),
    "hops = 0": lambda: cost.point_to_point(1, V5E, 0),
    "nbytes = -2": lambda: cost.all_gather(-2, V5P, 4),
    "nbytes = -3": lambda: cost.all_to_all(-3, V5P, 4),
    "nbytes = nan": lambda: cost.all_reduce(math.nan, V5P, 4),
    "one for each of the 2 axes": lambda: cost.all_gather(1, V5E, (4, 4), wrap=(True,)),
    # layers
    "strategy = 'zero': one of 'dp', 'fsdp', 'tp', 'fsdp_tp'": lambda: layer("zero", X=2),
    "B = -1: must be a positive number": lambda: layer("dp", {"B": -1}),
    "D = True": lambda: layer("dp", {"D": True}),
    "X = 2.5: must be a whole number": lambda: layer("dp", X=2.5),
    "dp has no axis Y\n  fix: use fsdp_tp": lambda: layer("dp", Y=2),
    "tp has no axis X": lambda: layer("tp", X=2),
    "fsdp moves bytes over X\n  fix: give Links(X=...)": lambda: layer(X=2),
    "W_X = 0: must be a positive number": lambda: layer(X=2, links={"X": 0}),
    "overlap = 'mean': one of 'max', 'sum'": lambda: layer(overlap="mean"),
    "direction = 'up'": lambda: layer(direction="up"),
    "C = inf": lambda: layer(links={"C": math.inf}),
    # decoding and serving
    "the axis Z": form_of("heads Y=2,Z=2"),
    "the axis X": form_of("sequence X=2"),
    "N = 64 does not divide over 128": form_of("heads Y=128"),
    "N = 64 does not divide over 3": form_of("heads Y=3"),
    "experts over chips, of a model without": form_of("heads E=4"),
    "of a model without\n  fix: use other axes": form_of("experts Y=2"),
    "form = 'ring'": form_of("ring Y=2"),
    "idle": lambda: place_axes((4, 4), {"Y": 8}),
    "Y = 3 does not fit": lambda: place_axes((4, 4), {"Y": 3, "Z": 5}),
    "weights = 0": lambda: serving.Load(weights=0, params=1),
    "kv_token = -1": lambda: serving.Load(weights=1, params=1, kv_token=-1),
    "batch = 0": lambda: serving.step(serving.Load(1, 1), 0, 1, V5E),
    "fit no slice of v5e: the largest is 16x16": lambda: serving.smallest_slice(1e15, V5E),
    # models
    "at least 1, got 2.5": lambda: tm.forward_flops(L70, 2.5, 1),
    "at least 1, got 0": lambda: tm.forward_flops(L70, 0, 1),
    "unknown remat 'some'": lambda: tm.train_flops(L70, 1, 1, remat="some"),
    "at least as many keys": lambda: tm.forward_flops(L70, 1, 8, 4, causal=True),
    "training=False": lambda: tm.utilization(L70, 3, 1, 0.5, 4, 1e9, S=6),
    "b is both 3 and 4": lambda: tm.einsum_flops("ab,bc->ac", (2, 3), (4, 5)),
    "the result has d": lambda: tm.einsum_flops("ab->d", (2, 3)),
    "unknown model 'llama9'\n  fix: ": lambda: get("llama9"),
    "must divide N=64": changed(K=7),
    "D is -1: must be in [1, 1e9]": changed(D=-1),
    "theta is 0.0: must be in (0, inf)": changed(theta=0.0),
    "dropout is 1.0: must be in [0, 1)": changed(dropout=1.0),
    "activation is 'swish': must be one of None, 'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2'": changed(
        activation="swish"
    ),
    "a window is a whole number": changed(window=0),
    "window has 2 entries for L=80": changed(window=(3, None)),
    "'linear' lacks its factor": changed(rope_scaling={"type": "linear"}),
}  # fmt: skip
test_refused = refused(by_words(REFUSED))
