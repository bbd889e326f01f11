"""A Transformer's step with scaled products: on a mesh as on one device, near the step without scales, in its bytes."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from refused import refused

from scaling import trace, tree
from scaling.configs import Config
from scaling.cost.counted import NONE, price
from scaling.hardware import chip
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.models.lora import Lora
from scaling.scaled import RECIPES
from scaling.strategies import transformer
from scaling.train.settings import Settings
from scaling.train.step_count import count

WIDE = Config("wide", 2, 256, 512, 8, 4, 64, 64)
BIASED = WIDE.with_(name="biased", attention_bias=True, output_bias=True, qk_norm=True, gated=False)
ONE = Mesh({"X": 1})
FAR = {"fp8-row": 0.15, "fp8-128": 0.13, "mxfp8": 0.13, "nvfp4": 0.4}  # errors of gradients, which add up over layers


def step(mesh, config, precision, **options):
    """Loss and gradients, whole, of params in float64, where an order of sums tips no rounding over."""
    g = torch.Generator().manual_seed(0)
    batch = [torch.randint(config.V, (8, 64), generator=g) for _ in range(2)]
    params = model.init(config, 0, torch.float64)
    tokens, targets = (tree.shard(x, "x[B_X, T]" if "X" in mesh.sizes else "x[B, T]", mesh) for x in batch)
    held = transformer.shard(params, config, mesh)
    loss, grads = transformer.loss_and_grads(held, tokens, targets, config, mesh, precision=precision, **options)
    return loss, tree.named_leaves(transformer.unshard(grads, config, mesh))


def far(found, wanted):
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


TWO, STAGES = {"X": 2, "Y": 2}, {"Z": 2, "X": 2}


@pytest.mark.parametrize(("mesh", "recipes"), [
    (TWO, ("mxfp8", "nvfp4")), (STAGES, ("fp8-row", "fp8-128")),
    pytest.param(TWO, ("fp8-row", "fp8-128"), marks=pytest.mark.sweep),
    pytest.param(STAGES, ("mxfp8",), marks=pytest.mark.sweep),  # not nvfp4, whose one scale is that of a microbatch
])  # fmt: skip
def test_on_a_mesh_as_on_one_device(mesh, recipes):
    for precision in recipes:
        config = BIASED if precision == "mxfp8" else WIDE
        options = {"microbatches": 2, "remat": "block"} if "Z" in mesh.sizes else {"remat": "matmuls"}
        loss, grads = step(mesh, config, precision, **options)
        if mesh.rank == 0:
            alone, wanted = step(ONE, config, precision, **options)
            assert abs(loss - alone) < 1e-12, precision
            assert far(grads, wanted) < 1e-10, precision


@pytest.mark.parametrize(
    "config",
    [pytest.param(WIDE, marks=pytest.mark.sweep), BIASED.with_(norms="both", residual_scale=0.5)],
    ids=["plain", "norms"],
)
def test_what_is_computed_again_changes_nothing(config):
    """In the backward pass a layer has the weights of both passes."""
    (loss, grads), (alone, wanted) = (step(ONE, config, "mxfp8", remat=remat) for remat in ("block", "none"))
    assert loss == alone
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)


@cache
def unscaled():
    return step(ONE, WIDE, "")


@pytest.mark.parametrize("precision", RECIPES)
def test_gradients_are_near_those_of_products_that_are_not_scaled(precision):
    (loss, grads), (alone, wanted) = step(ONE, WIDE, precision), unscaled()
    assert 0 < abs(loss - alone) < 0.01
    assert 0.02 < far(grads, wanted) < FAR[precision]


def test_weights_are_gathered_in_the_bytes_of_their_format():
    mesh, config = AbstractMesh({"X": 4}), WIDE.with_(name="wider", D=1024, F=4096, L=1)
    params = transformer.shard(model.init(config, 0, torch.bfloat16, device="meta"), config, mesh)
    tokens = torch.zeros(8, 128, dtype=torch.long, device="meta")
    sent = {}
    for precision in ("", *RECIPES):
        with trace.trace() as log:
            transformer.loss_and_grads(params, tokens, tokens, config, mesh, precision=precision)
        gathers = [e.nbytes for e in log.events if e.op == "AllGather" and str(e.before).startswith(("W_", "W."))]
        sent[precision] = sum(n for n in gathers if n >= 1024 * 256 / 32)  # of matrices and their scales
    shares = {precision: sent[precision] / sent[""] for precision in RECIPES}
    assert shares["mxfp8"] == pytest.approx(33 / 64, rel=0.01)
    assert shares["fp8-128"] == pytest.approx(0.5 + 1 / 64, rel=0.01)
    assert shares["nvfp4"] == pytest.approx((9 / 32 + 33 / 64) / 2, rel=0.01)  # forward and backward
    assert shares["fp8-row"] == pytest.approx(0.5, rel=0.02)


def test_a_plan_prices_products_in_fp8_at_their_own_rate():
    """Of a layer's three products two are in FP8; together they are the FLOPs of the step without scales."""
    plain = Settings(WIDE, "", "", 8, 64, dtype="bf16")
    counts, h100 = [count(replace(plain, precision=name), {"X": 2}) for name in ("", "fp8-row")], chip("h100")
    assert counts[1].flops == counts[0].flops
    weights = WIDE.L * WIDE.D * (2 * WIDE.N * WIDE.H + 2 * WIDE.K * WIDE.H + 3 * WIDE.F)
    assert counts[1].scaled.amount == 4 * (4 * 64) * weights  # of this rank's tokens, forward and to the inputs
    without = replace(counts[1], scaled=NONE).flops
    seconds = [price(each, {"X": 2}, h100, "bf16").math for each in counts]
    assert 0 < without < counts[1].flops
    assert seconds[1] < seconds[0]


def asked(config=WIDE, mesh: Any = ONE, precision="mxfp8", **options):
    tokens = torch.zeros(4, 64, dtype=torch.long, device=mesh.device)
    params = model.init(config, 0, torch.float32, device=mesh.device)
    lora = options.get("lora")
    held = transformer.shard(params, config, mesh) | ({"lora": {}} if lora else {})
    return lambda: transformer.loss_and_grads(held, tokens, tokens, config, mesh, precision=precision, **options)


test_refusals = refused({
    "another recipe": (asked(precision="fp6"), "fp8-row"),
    "experts": (asked(WIDE.with_(E=4, k=2)), "products of their own"),
    "adapters": (asked(lora=Lora(4)), "adapters"),
    "kept weights": (asked(keep_weights=True), "the forms of both passes"),
    "remat": (asked(WIDE.with_(parallel=True), remat="block"), "parallel blocks"),
    "KV heads": (asked(mesh=AbstractMesh({"Y": 8})), "KV heads are replicated"),
    "a cut block": (asked(mesh=AbstractMesh({"X": 4}), precision="fp8-128"), "a shard cuts no block"),
})  # fmt: skip
