"""Lines on arrays with scales that are illegal: refused when they run, and found by the judge, with rule and fix."""

import pytest
from refused import evaluated, refused

from scaling.algebra import derive, matmul, reshard  # noqa: F401 - PLANNED names them
from scaling.check import check_source
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError

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
ILLEGAL = {  # a line: words of its error
    'quantize("G[D, F] {U_X} -> G[D, F] {Q_F}", W, mesh, "mxfp8")': "a sum is not quantized",
    'parse("G[D, F] {U_X} {Q_F}")': "a sum is not quantized",
    'parse("W[D, F] {Q_E}")': "dim E is not a dim",
    'parse("W[D, F] {Q_D,D}")': "named twice",
    'parse("Loss[] {Q}")': "keep a number",
    'quantize("W[D_X, F] -> W[D, F] {Q_D}", W, mesh, "mxfp8")': "changes how an array is held",
    'quantize("W[D_X, F] -> W[D_X, F]", W, mesh, "mxfp8")': "changes how an array is held",
    'quantize("W[D_X, F] {Q_D} -> W[D_X, F] {Q_F}", W_D, mesh, "mxfp8")': "changes how an array is held",
    'quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W[:48], mesh, "mxfp8")': "a shard cuts no block",
    'quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, "fp8-tensor")': "write {Q}",
    'quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, "mxfp6")': "unknown format",
    'quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W, mesh, ["mxfp8"])': "unknown format",
    'quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W.long(), mesh, "mxfp8")': "the operand is torch.int64",
    'quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W.cfloat(), mesh, "mxfp8")': "the operand is torch.complex64",
    'quantize("W[D_X, F] -> W[D_X, F] {Q_D}", W_D, mesh, "mxfp8")': "the operand is Scaled",
    'quantize("dIn[D_X, F] -> dIn[D_X, F] {Q_D}", dIn, mesh, "mxfp8")': "rounding has no derivative",
    'all_gather("W[D_X, F] {Q_D} -> W[D, F]", W_D, mesh)': "moves its values and its scales",
    'all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_F}", W_D, mesh)': "moves its values and its scales",
    'all_gather("W[D_X, F] {Q_F} -> W[D, F] {Q_F}", W_D, mesh)': "do not follow from those along another",
    'all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_D}", W, mesh)': "one plain array has this type",
    'all_reduce("W[D, F] {U_X} -> W[D, F]", W_F, mesh)': "a sum is not quantized",
    'reduce_scatter("W[D, F] {U_X} -> W[D_X, F]", W_F, mesh)': "a sum is not quantized",
    'broadcast("W[D, F] {U_X} -> W[D, F]", W_F, mesh)': "a sum is not quantized",
    'shard("W[D, F] {Q_F} -> W[D, F_XYZ] {Q_F}", W_F, AbstractMesh({"X": 2, "Y": 2, "Z": 2}))': "does not divide",
    'all_to_all("W[D_X, F] {Q_D} -> W[D, F_X] {Q_F}", W_D, mesh)': "moves its values and its scales",
    'einsum("In[D, F] * W[D, F] {Q_F} -> C[F]", In, W_F)': "every summed dim is in {Q_...}",
    'einsum("W[D, F] {Q_F} -> C[F]", W_F)': "every summed dim is in {Q_...}",
    'einsum("W[D_X, F] {Q_F} * In[D_X, B] {Q_D} -> C[F, B] {U_X}", W_F, W_D)': "quantize it again from the master",
    'einsum("In[B, F] * W[D, F] {Q_F} -> C[B, D] {Q_D}", In, W_F)': "a product is accumulated in float32",
    'einsum("In[B, F] * W[D, F] {Q_F} -> C[B, D]", In, W)': "is a plain tensor",
    'einsum("In[B, F] * W[D, F] -> C[B, D]", In, W_F)': "says that an array has scales",
    'einsum("In[B, D] * W[D, F] {Q_D} -> C[B, F]", dIn, W_F)': "do not follow from those along another",
    'einsum("In[B, D] * W[D, F_X] {Q_D} -> C[B, F_X]", dIn, row)': "rounding has no derivative",
    'dequantize("W[D_X, F] {Q_D} -> W[D, F]", W_D, mesh)': "changes how an array is held",
    'dequantize("W[D_X, F] {Q_D} -> W[D_X, F]", W, mesh)': "values and scales",
    'reshard("W[D_X, F] {Q_D} -> W[D, F_X] {Q_D}", W, mesh)': "one plain array has this type",
    'send("W[D, F] {Q_D}", W, mesh, "X", 1)': "one plain array has this type",
    'all_gather("W[D_X, F] -> W[D, F]", W_D, mesh)': "fix: write {Q_...} on both sides",
    'transfer("W[D, F] {Q_D} -> W[D, F] {Q_D}", W, mesh, mesh)': "one plain array has this type",
    'all_gather("W[D_X, F] {Q_D} -> W[D, F] {Q_D}", Scaled(W_D.q, row.s, None, W_D.format, (-2,)), mesh)': "one rank",
    'dequantize("W[D_X, F] {Q_D} -> W[D_X, F]", W_D.of([W_D.q.byte(), W_D.s]), mesh)': "parts of torch.uint8",
}
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
