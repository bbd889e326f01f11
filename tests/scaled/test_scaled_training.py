"""A Transformer's step with scaled products: on a mesh as on one device, near the step without scales, in its bytes.

Lines on arrays with scales that are illegal are refused when they run, and found by the judge, with rule and fix."""

from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch
from problems import rows_on
from refused import evaluated, named, read_table, refused

from scaling import trace, tree
from scaling.algebra import derive, matmul, reshard  # noqa: F401 - PLANNED names them
from scaling.check import check_source
from scaling.configs import Config, Latent, Linear
from scaling.cost.counted import NONE, price
from scaling.hardware import chip
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.models.leaves import matrices_of, without
from scaling.models.lora import Lora  # noqa: F401 - a call in REFUSED names it
from scaling.scaled import RECIPES, UNSCALED
from scaling.spec import ShardingError, dtype_bytes, format_of, parse
from scaling.strategies import transformer
from scaling.train.counting import count, step_shapes
from scaling.train.settings import Settings

WIDE = Config("wide", 2, 256, 512, 8, 4, 64, 64)
BIASED = WIDE.with_(name="biased", attention_bias=True, output_bias=True, qk_norm=True, gated=False)
EXPERTS = WIDE.with_(name="experts", F=256, E=4, k=2, aux_coef=0.01)
GATED = EXPERTS.with_(name="gated", expert_bias=True, clamp=7.0, shared=1, shared_gate=True, capacity=1.0)
LATENTS = WIDE.with_(name="latents", K=8, H=32, latent=Latent(256, 256, 32, 32, 32), dense_layers=1, F_dense=256, F=128,
                     E=4, k=2, shared=1, routing="sigmoid", norm_topk=True)  # fmt: skip
LINEAR = WIDE.with_(name="linear", F=256, K=8, H=32, head_gate=True, linear=Linear(4, 8, 32, 32, 4, (0,)))
ONE = Mesh({"X": 1})
FAR = {"fp8-row": 0.15, "fp8-128": 0.13, "mxfp8": 0.13, "nvfp4": 0.4}  # errors of gradients, which add up over layers


def step(mesh, config, precision, **options):
    """Loss and gradients, whole, of params in float64, where an order of sums tips no rounding over."""
    g = torch.Generator().manual_seed(0)
    batch = [torch.randint(config.V, (8, 64), generator=g) for _ in range(2)]
    params = model.init(config, 0, torch.float64)
    tokens, targets = rows_on(mesh, *batch)
    held = transformer.shard(params, config, mesh)
    loss, grads = transformer.loss_and_grads(held, tokens, targets, config, mesh, precision=precision, **options)
    return loss, tree.named_leaves(transformer.unshard(grads, config, mesh))


def far(found, wanted):
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


COLUMNS, FEW, MORE = (
    "mesh  config  recipes\n",
    """
X=2,Y=2  BIASED   ("mxfp8",)
X=2,Y=2  WIDE     ("nvfp4",)
Z=2,X=2  WIDE     ("fp8-row", "fp8-128")
E=2,Y=2  EXPERTS  ("fp8-row", "nvfp4")
X=2,C=2  LATENTS  ("mxfp8",)
C=2      LINEAR   ("nvfp4",)
""",
    """
X=2,Y=2  LINEAR   tuple(RECIPES)
X=2,Y=2  WIDE     ("fp8-row", "fp8-128")
# nvfp4's one scale is that of a microbatch
Z=2,X=2  BIASED   ("mxfp8",)
X=2,E=2  GATED    tuple(RECIPES)
E=2,Y=2  LATENTS  ("fp8-row", "nvfp4")
Z=2,E=2  EXPERTS  ("fp8-128", "mxfp8")
""",
)
FEW, MORE = (read_table(COLUMNS + rows.strip(), globals()) for rows in (FEW, MORE))


@pytest.mark.parametrize(
    ("mesh", "config", "recipes"), [*FEW, *(pytest.param(*case, marks=pytest.mark.sweep) for case in MORE)]
)
def test_on_a_mesh_as_on_one_device(mesh, config, recipes):
    for precision in recipes:
        options = {"microbatches": 2, "remat": "block"} if "Z" in mesh.sizes else {"remat": "matmuls"}
        if config.moe or config.linear:  # the balance is that of a microbatch, and a state is handed on
            options = {"context": "ring", "remat": "block"}
        schedule = {"schedule": "zb-h1"} if "Z" in mesh.sizes else {}
        loss, grads = step(mesh, config, precision, **options, **schedule)
        if mesh.rank == 0:
            alone, wanted = step(ONE, config, precision, **options)
            assert abs(loss - alone) < 1e-12, precision
            assert far(grads, wanted) < 1e-10, precision


@pytest.mark.parametrize(
    "config",
    [
        WIDE.with_(parallel=True, norms="shared", head_gate=True),
        BIASED.with_(norms="both", residual_scale=0.5),
        LATENTS,
    ],
    ids=["parallel", "norms", "experts"],
)
def test_what_is_computed_again_changes_nothing(config):
    """A layer that is computed again has the weights of both passes; other policies compute no product again."""
    alone, wanted = step(ONE, config, "mxfp8")
    for remat in ("block",) if config.moe else ("block", "matmuls"):
        loss, grads = step(ONE, config, "mxfp8", remat=remat)
        assert loss == alone
        assert all(torch.equal(grads[name], wanted[name]) for name in wanted), remat


@cache
def unscaled():
    return step(ONE, WIDE, "")


@pytest.mark.parametrize("precision", RECIPES)
def test_gradients_are_near_those_of_products_that_are_not_scaled(precision):
    (loss, grads), (alone, wanted) = step(ONE, WIDE, precision), unscaled()
    assert 0 < abs(loss - alone) < 0.01
    assert 0.02 < far(grads, wanted) < FAR[precision]


@pytest.mark.parametrize("config", [WIDE, LATENTS, LINEAR], ids=lambda config: config.name)
@pytest.mark.parametrize("precision", RECIPES)
def test_weights_are_gathered_in_the_bytes_of_their_formats(config, precision):
    """In both passes, values and the scales of blocks or rows; where X splits a row, its maximum is reduced instead."""
    sizes = {"X": 2, "E": 2} if config.moe else {"X": 2, "Y": 2}
    mesh, dims, wanted = AbstractMesh(sizes), config.sizes, 0
    types, inputs = (tree.leaves(tree_of(config)) for tree_of in (partial(transformer.specs, mesh=mesh), matrices_of))
    for text, products in zip(types, inputs, strict=True):
        spec = parse(text)
        if not products or spec.name in UNSCALED:
            continue
        used, recipe = parse(without(text, ("X",))), RECIPES[precision]
        local = dict(zip(used.dim_names, used.local_shape(dims, mesh), strict=True))
        for summed, name in zip(products.split(" -> "), (recipe.forward, recipe.weights), strict=True):
            f, values = format_of(name), prod(local.values())
            axes = [axis for dim in summed.split() for axis in spec.axes_of(dim)]
            scales = values / (f.block or prod(local[dim] for dim in summed.split()))
            wanted += dtype_bytes(f.values) * values
            wanted += dtype_bytes(f.scales[0]) * scales if f.block or "X" not in axes else 0
    settings = Settings(config, "", "", 8, 64, dtype="bf16", precision=precision)
    params, (tokens, *_) = step_shapes(settings, mesh)
    with trace.trace() as log:
        transformer.loss_and_grads(params, tokens, tokens, config, mesh, precision=precision)
    gathers = [e for e in log.events if e.op == "AllGather" and e.axes == ("X",)]
    assert sum(e.nbytes for e in gathers if e.before.name[-2:] in (".q", ".s")) == wanted
    counted = count(settings, sizes).lines
    assert sum(calls.amount for kind, calls in counted.items() if (kind.op, kind.axes) == ("AllGather", ("X",))) == sum(
        e.nbytes for e in gathers
    )


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


def asked(config=WIDE, mesh: Any = ONE, precision="mxfp8", seq=64, **options):
    tokens = torch.zeros(4, seq, dtype=torch.long, device=mesh.device)
    params = model.init(config, 0, torch.float32, device=mesh.device)
    lora = options.get("lora")
    held = transformer.shard(params, config, mesh) | ({"lora": {}} if lora else {})
    return transformer.loss_and_grads(held, tokens, tokens, config, mesh, precision=precision, **options)


REFUSED = """
call                                                        words of its error
asked(precision='fp6')                                      fp8-row
asked(mesh=AbstractMesh({'C': 4}), seq=32)                  16 of T/2 on each rank, in blocks of 32
asked(mesh=AbstractMesh({'C': 4}), seq=16, context='ring')  16 of T on each rank, in blocks of 32
asked(lora=Lora(4))                                         rounds small changes of A B away
asked(keep_weights=True)                                    the forms of both passes
asked(mesh=AbstractMesh({'Y': 8}))                          give Y a size that divides 4
asked(mesh=AbstractMesh({'X': 4}), precision='fp8-128')     64 of D on each rank, in blocks of 128
asked(LATENTS, AbstractMesh({'Y': 4}))                      16 of T_Y on each rank, in blocks of 32
"""
test_refusals = refused(evaluated(REFUSED, globals()))


START = """
import torch
from scaling.collectives import *
from scaling.launch import run
from scaling.mesh import AbstractMesh
from scaling.scaled import Scaled, dequantize, quantize
from scaling.spec import parse

def main(mesh):
    W, In, dIn = torch.zeros(64, 128), torch.zeros(64, 128), torch.zeros(64, 64, requires_grad=True)
    W, In, dIn = (x.to(mesh.device) for x in (W, In, dIn))
    W_D = quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, "mxfp8")
    W_F = quantize("W[D, F] -> W[D, F] {Q_F}", W, mesh, "mxfp8")
    row = quantize("W[D, F_X] -> W[D, F_X] {Q_D}", W, mesh, "fp8-row")
    """
# a line: words of its error
ILLEGAL = named("""
line                                                         words of its error
quantize("G[D, F] {U_X} -> G[D, F] {Q_F}", W, mesh, "mxfp8")  a sum is not quantized
parse("G[D, F] {U_X} {Q_F}")                                 a sum is not quantized
parse("W[D, F] {Q_E}")                                       dim E is not a dim
parse("W[D, F] {Q_D,D}")                                     named twice
parse("Loss[] {Q}")                                          keep a number
quantize("W[D_X, F] -> W[D, F] {Q_D}", W, mesh, "mxfp8")     changes how an array is held
quantize("W[D_X, F] -> W[D_X, F]", W, mesh, "mxfp8")         changes how an array is held
quantize("W[D_X, F] {Q_D} -> W[D_X, F] {Q_F}", W_D, mesh, "mxfp8")  changes how an array is held
quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W[:48], mesh, "mxfp8")  a shard cuts no block
quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, "fp8-tensor")  write {Q}
quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, "mxfp6")   unknown format
quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, ["mxfp8"])  unknown format
quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W.long(), mesh, "mxfp8")  the operand is torch.int64
quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W.cfloat(), mesh, "mxfp8")  the operand is torch.complex64
quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W_D, mesh, "mxfp8")  the operand is Scaled
quantize("dIn[D_X, F] -> dIn[D_X, F] {Q_D}", dIn, mesh, "mxfp8")  rounding has no derivative
all_gather("W[D_X, F] {Q_D} -> W[D, F]", W_D, mesh)          moves its values and its scales
all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_F}", W_D, mesh)    moves its values and its scales
all_gather("W[D_X, F] {Q_F} -> W[D, F] {Q_F}", W_D, mesh)    do not follow from those along another
all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_D}", W, mesh)      one plain array has this type
all_reduce("W[D, F] {U_X} -> W[D, F]", W_F, mesh)            a sum is not quantized
reduce_scatter("W[D, F] {U_X} -> W[D_X, F]", W_F, mesh)      a sum is not quantized
broadcast("W[D, F] {U_X} -> W[D, F]", W_F, mesh)             a sum is not quantized
shard("W[D, F] {Q_F} -> W[D, F_XYZ] {Q_F}", W_F, AbstractMesh({"X": 2, "Y": 2, "Z": 2}))  does not divide
all_to_all("W[D_X, F] {Q_D} -> W[D, F_X] {Q_F}", W_D, mesh)  moves its values and its scales
einsum("In[D, F] * W[D, F] {Q_F} -> C[F]", In, W_F)          every summed dim is in {Q_...}
einsum("W[D, F] {Q_F} -> C[F]", W_F)                         every summed dim is in {Q_...}
einsum("W[D_X, F] {Q_F} * In[D_X, B] {Q_D} -> C[F, B] {U_X}", W_F, W_D)  quantize it again from the master
einsum("In[B, F] * W[D, F] {Q_F} -> C[B, D] {Q_D}", In, W_F)  a product is accumulated in float32
einsum("In[B, F] * W[D, F] {Q_F} -> C[B, D]", In, W)         is a plain tensor
einsum("In[B, F] * W[D, F] -> C[B, D]", In, W_F)             says that an array has scales
einsum("In[B, D] * W[D, F] {Q_D} -> C[B, F]", dIn, W_F)      do not follow from those along another
einsum("In[B, D] * W[D, F_X] {Q_D} -> C[B, F_X]", dIn, row)  rounding has no derivative
dequantize("W[D_X, F] {Q_D} -> W[D, F]", W_D, mesh)          changes how an array is held
dequantize("W[D_X, F] {Q_D} -> W[D_X, F]", W, mesh)          values and scales
reshard("W[D_X, F] {Q_D} -> W[D, F_X] {Q_D}", W, mesh)       one plain array has this type
send("W[D, F] {Q_D}", W, mesh, "X", 1)                       one plain array has this type
all_gather("W[D_X, F] -> W[D, F]", W_D, mesh)                fix: write {Q_...} on both sides
transfer("W[D, F] {Q_D} -> W[D, F] {Q_D}", W, mesh, mesh)    one plain array has this type
all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_D}", Scaled(W_D.q, row.s, None, W_D.format, (-2,)), mesh)  one rank
dequantize("W[D_X, F] {Q_D} -> W[D_X, F]", W_D.of([W_D.q.byte(), W_D.s]), mesh)  parts of torch.uint8
""")
PLANNED = (
    "reshard('A[I_X, J] {Q_J}', 'A[I, J_X]')", "matmul('A[I, J_X] {Q_J}', 'B[J, K]')",
    "derive('In[B_X, D] * W[D, F] {Q_D} -> Out[B_X, F]')",
)  # fmt: skip
test_plans = refused(evaluated(dict.fromkeys(PLANNED, "plans and derived programs are of plain arrays"), globals()))
LATE = {  # legal lines whose operand has another type
    'quantize("C[B, F] -> C[B, F] {Q_F}", einsum("W[D_X, F] * W[D_X, B] -> C[B, F] {U_X}", W, W), mesh, "mxfp8")',
    'quantize("W[D, F] -> W[D, F] {Q_D}", dequantize("W[D_X, F] {Q_D} -> W[D_X, F]", W_D, mesh), mesh, "mxfp8")',
    'einsum("In[B, D] * W[D, F] {Q_D} -> C[B, F]", dIn.detach(), W_D)',
    'dequantize("W[D, F] {Q_D} -> W[D, F]", W_D, mesh)',
}


@pytest.mark.parametrize("line", ILLEGAL)
def test_an_illegal_line_is_refused_and_found(line):
    names: dict = {}
    exec(f"{START}return {line}", names)
    with pytest.raises(ShardingError) as found:
        names["main"](AbstractMesh({"X": 2, "Y": 2}))
    text = str(found.value)
    assert ILLEGAL[line] in text
    assert "fix:" in text
    judged = check_source(f'{START}return {line}\n\nrun(main, {{"X": 2, "Y": 2}})\n', "program.py")
    assert {ILLEGAL[line] in finding.message for finding in judged} == {True}, judged


@pytest.mark.parametrize("line", sorted(LATE))
def test_the_judge_finds_an_operand_of_another_type(line):
    judged = check_source(f'{START}return {line}\n\nrun(main, {{"X": 2, "Y": 2}})\n', "program.py")
    assert len(judged) == 1, judged
    assert "fix:" in judged[0].message


def test_the_judge_follows_legal_lines():
    program = (
        START
        + """W = all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_D}", W_D, mesh, async_op=True)
    x = quantize("In[B_X, D] -> In[B_X, D] {Q_D}", torch.zeros(32, 128, device=mesh.device), mesh, "mxfp8")
    Out = einsum("In[B_X, D] {Q_D} * W[D, F] {Q_D} -> Out[B_X, F]", x, W.wait())
    y = all_reduce("Out[B, F] {U_X} -> Out[B, F]", Out, mesh)

run(main, {"X": 2, "Y": 2})
"""
    )
    (found,) = check_source(program, "program.py")
    assert "the operand is Out[B_X, F]" in found.message  # the product has the type that its line says
