"""What rooflines, collectives, layers, decoding and models refuse."""

import math
from dataclasses import replace

from refused import refused

from scaling import cost, serve
from scaling.configs import get
from scaling.cost import decoding, gpu, serving
from scaling.cost import transformer as tm
from scaling.cost.lanes import place_axes
from scaling.hardware import Chip, Measured, chip
from scaling.hardware.torus import Torus
from scaling.mesh import AbstractMesh

V5E, V5P, H100, L70 = chip("v5e"), chip("v5p"), chip("h100"), get("llama3-70b")
NODE = replace(H100, levels=H100.levels[:1])
C, W = V5E.flops(), V5E.hbm_bw
RING = Torus((4,), (True,))


def layer(strategy="fsdp", shape=None, links=None, **options):
    """A layer of Part 5, of which something is another."""
    shape = {"B": 1e6, "D": 8192, "F": 32768} | (shape or {})
    return cost.layer(strategy, cost.LayerShape(**shape), cost.Links(**{"C": C} | (links or {})), **options)


REFUSED = {
    "flops": (lambda: cost.roofline(-1, 1, C, W), "flops = -1"),
    "no chip": (lambda: cost.roofline(1, 1, 0, W), "C = 0"),
    "no rows": (lambda: cost.matmul(0, 1, 1, C, W), "B = 0"),
    "a dtype": (lambda: cost.matmul(1, 1, 1, C, W, "bf17"), "unknown dtype"),
    "two dtypes": (lambda: cost.matmul(1, 1, 1, C, W, ("bf16", "bf16")), "one dtype, or three"),
    "D without F": (lambda: cost.critical_batch(C, W, 4096), "F = None"),
    "an intensity": (lambda: cost.attainable(-1, C, W), "intensity = -1"),
    "tiles": (
        lambda: cost.tiled_matmul(256, 512, 128, (100, 128, 32), C, W),
        "tiles (100, 128, 32) do not divide (256, 512, 128)"),
    "three chips": (lambda: cost.split_contraction(1, 1, 1, C, W, chips=3), "chips = 3"),
    "ZeRO 4": (lambda: cost.training_memory(1e9, zero=4), "zero = 4"),
    "activations": (lambda: cost.training_memory(1e9, activations=-1), "activations = -1"),
    "an mfu": (lambda: cost.seconds_at(1, 1, C, 1.5), "mfu"),
    # GPUs
    "bytes": (lambda: gpu.all_gather(-1, H100, 8), "nbytes = -1"),
    "no GPU": (lambda: gpu.all_gather(1, H100, 0), "gpus = 0"),
    "a node in three": (lambda: gpu.all_gather(1, H100, 8, inner=3), "8 x 3 GPUs of h100 do not fill"),
    "two nodes of one": (
        lambda: gpu.all_gather(1, NODE, 16), "16 GPUs: nothing is known of h100's network beyond the node"),
    "a TPU": (lambda: gpu.all_gather(1, V5E, 8), "v5e (tpu) has no levels"),
    "no experts": (lambda: gpu.all_to_all(1, H100, 8, k=0), "k = 0"),
    "one node": (lambda: gpu.data_threshold(NODE), "nothing is known of its network beyond the node"),
    "more experts than there are": (lambda: cost.expert_inflation(4, 8), "active = 8 of 4 experts"),
    "experts on half a node": (
        lambda: gpu.expert_layer(1e6, 7168, 2048, 12, 4, H100), "Z = 12: experts over several nodes take whole ones"),
    # collectives
    "no chip at a place": (lambda: RING.distance((0,), (4,)), "no chip"),
    "one bool of two": (lambda: Torus((4, 4), (True,)), "one length and one bool"),
    "an even cut": (lambda: Torus((3,), (True,)).bisection_links, "no even cut"),
    "bytes of a torus": (lambda: RING.all_to_all_seconds(-1, 1), "bytes are not negative"),
    "an op": (lambda: cost.seconds("Gossip", 1e8, V5P, 4), "op = 'Gossip': one of 'AllGather'"),
    "what was not measured": (
        lambda: cost.seconds("AllToAll", 1e9, Chip("box", "cpu", measured=(Measured("AllGather", 2, 1, 1e9),)), 2),
        "AllToAll over 2 ranks was not measured (there is: AllGather over 2)"),
    "ports": (lambda: cost.point_to_point(1, V5E, 2, ports=5), "v5e has 4 links"),
    "no hops": (lambda: cost.point_to_point(1, V5E, 0), "hops = 0"),
    **{
        f"{f.__name__}, {words}": (lambda f=f, arguments=arguments, more=more: f(*arguments, **more), words)
        for f in (cost.all_gather, cost.all_to_all)
        for arguments, more, words in (
            ((-1, V5P, 4), {}, "nbytes = -1"),
            ((math.nan, V5P, 4), {}, "nbytes = nan"),
            ((1, V5E, (4, 4, 4)), {}, "3 axes: v5e has 2"),
            ((1, V5E, 32), {}, "slice 32"),
            ((1, H100, 8), {}, "has no axes"),
            ((1, V5E, (4, 4)), {"wrap": (True,)}, "one for each of the 2 axes"),
        )
    },
    # layers
    "a strategy": (lambda: layer("zero", X=2), "strategy = 'zero': one of 'dp', 'fsdp', 'tp', 'fsdp_tp'"),
    "B": (lambda: layer("dp", {"B": -1}), "B = -1: must be a positive number"),
    "D": (lambda: layer("dp", {"D": True}), "D = True"),
    "X": (lambda: layer("dp", X=2.5), "X = 2.5: must be a whole number"),
    "Y of DP": (lambda: layer("dp", Y=2), "dp has no axis Y\n  fix: use fsdp_tp"),
    "X of TP": (lambda: layer("tp", X=2), "tp has no axis X"),
    "no link": (lambda: layer(X=2), "fsdp moves bytes over X\n  fix: give Links(X=...)"),
    "a link": (lambda: layer(X=2, links={"X": 0}), "W_X = 0: must be a positive number"),
    "an overlap": (lambda: layer(overlap="mean"), "overlap = 'mean': one of 'max', 'sum'"),
    "a direction": (lambda: layer(direction="up"), "direction = 'up'"),
    "C": (lambda: layer(links={"C": math.inf}), "C = inf"),
    # decoding and serving
    **{
        f"{form} on {sizes}": (lambda form=form, sizes=sizes: decoding.check_form(form, L70, sizes), words)
        for form, sizes, words in (
            ("heads", {"Y": 2, "Z": 2}, "the axis Z"),
            ("sequence", {"X": 2}, "the axis X"),
            ("heads", {"Y": 128}, "N = 64"),
            ("heads", {"Y": 3}, "N = 64"),
            ("experts", {"E": 4}, "of a model without"),
            ("heads", {"E": 4}, "of a model without"),
            ("ring", {"Y": 2}, "form"),
        )
    },
    "latents in 2d": (lambda: decoding.check_form("2d", get("deepseek-v3"), {"X": 2}), "fix: choose form"),
    "latents served in 2d": (
        lambda: serve.specs(get("deepseek-v3"), AbstractMesh({"X": 2}), form="2d"), "no latent attention"),
    "idle chips": (lambda: place_axes((4, 4), {"Y": 8}), "idle"),
    "three of four": (lambda: place_axes((4, 4), {"Y": 3, "Z": 5}), "Y = 3 does not fit"),
    "no weights": (lambda: serving.Load(weights=0, params=1), "must be a"),
    "a cache": (lambda: serving.Load(weights=1, params=1, kv_token=-1), "must be a"),
    "no batch": (lambda: serving.step(serving.Load(1, 1), 0, 1, V5E), "batch = 0"),
    "no slice": (lambda: serving.smallest_slice(1e15, V5E), "fit no slice of v5e: the largest is 16x16"),
    # models
    "half a row": (lambda: tm.forward_flops(L70, 2.5, 1), "whole number"),
    "no row": (lambda: tm.forward_flops(L70, 0, 1), "whole number"),
    "remat": (lambda: tm.train_flops(L70, 1, 1, remat="some"), "unknown remat 'some'"),
    "fewer keys": (lambda: tm.forward_flops(L70, 1, 8, 4, causal=True), "at least as many keys"),
    "S in training": (lambda: tm.utilization(L70, 3, 1, 0.5, 4, 1e9, S=6), "training=False"),
    "a size twice": (lambda: tm.einsum_flops("ab,bc->ac", (2, 3), (4, 5)), "b is both 3 and 4"),
    "a dim of nothing": (lambda: tm.einsum_flops("ab->d", (2, 3)), "the result has d"),
    "a model": (lambda: get("llama9"), "unknown model 'llama9'\n  fix: "),
    **{
        f"config {change}": (lambda change=change: L70.with_(**change), words)
        for change, words in (
            ({"K": 7}, "must divide N=64"),
            ({"D": -1}, "D must be a whole number"),
            ({"theta": 0.0}, "theta and eps must be above 0"),
            ({"dropout": 1.0}, "dropout must lie in [0, 1)"),
            ({"activation": "relu2"}, "activation must be one of silu, gelu, gelu_tanh, relu: 'relu2'"),
            ({"window": 0}, "a window is a whole number"),
            ({"window": (3, None)}, "window has 2 entries for L=80"),
            ({"rope_scaling": {"type": "linear"}}, "'linear' lacks its factor"),
        )
    },
}  # fmt: skip
test_refused = refused(REFUSED)
