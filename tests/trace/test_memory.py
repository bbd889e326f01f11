"""Peak memory: known by hand on small runs, and a pod's step planned in seconds."""

import time

import pytest
import torch

from scaling.algebra import derive
from scaling.collectives import all_gather, einsum, run_backward, run_forward
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.strategies import fsdp_tp
from scaling.trace.peak import peak_memory


def meta(spec, sizes, mesh, layers=None):
    shape = parse(spec).local_shape(sizes, mesh)
    return torch.empty((layers, *shape) if layers else shape, dtype=torch.bfloat16, device="meta")


def test_storages_are_counted_once_and_until_they_are_gone():
    x = torch.empty(100, device="meta")
    with peak_memory() as memory:
        y = x + 1
        assert memory.now == memory.peak == 800  # x counts from its first use
        view = y.view(10, 10)[2:]
        assert memory.now == 800
        del y
        assert memory.now == 800  # the view still needs it
        del view
        assert memory.now == 400
        z = x * 2
        assert memory.peak == 800
    del z
    assert memory.peak == 800


def test_steps_of_a_gather():
    mesh = AbstractMesh({"X": 4})
    W, In = torch.empty(8, 16, device="meta"), torch.empty(2, 32, device="meta")
    with peak_memory() as memory:
        whole = all_gather("W[D_X, F] -> W[D, F]", W, mesh)
        Tmp = einsum("In[B_X, D] * W[D, F] -> Tmp[B_X, F]", In, whole)
        del whole
        Tmp + 1
    (gather, after, _), (product, _, peak) = memory.steps
    assert (gather.op, product.op) == ("AllGather", "Einsum")
    assert after == 4 * (8 * 16 + 32 * 16)
    assert peak == 4 * (8 * 16 + 32 * 16 + 2 * 32 + 2 * 16)
    assert memory.peak == peak
    assert "AllGather_X" in memory.table()


@pytest.mark.parametrize("keep", [True, False])
def test_a_derived_program_peaks_where_it_keeps_what_it_gathered(keep):
    """FSDP: weights kept gathered for the backward are alive together; otherwise one at a time."""
    line = "In[B_X, D] * W_in[D_X, F] * W_out[F, D_X] -> Out[B_X, D]"
    sizes, mesh = {"B": 64, "D": 256, "F": 1024}, AbstractMesh({"X": 8})
    program = derive(line, keep_gathered=["W_in", "W_out"] if keep else False)
    inputs = {spec.name: meta(str(spec), sizes, mesh) for spec in program.operands}
    whole = 2 * 256 * 1024
    with peak_memory() as memory:
        Out, saved = run_forward(program, inputs, mesh)
        held = memory.now
        run_backward(program, torch.empty_like(Out), saved, mesh)
    shards = 2 * whole // 8
    assert (held > 2 * whole) == keep
    assert memory.peak >= shards + whole


def test_a_pod_in_seconds():
    """LLaMA-3 70B's MLPs, 8 layers of them, on X=1024, Y=8: bytes by the closed form, and every step's memory."""
    sizes, L, mesh = {"B": 1 << 20, "D": 8192, "F": 28672}, 8, AbstractMesh({"X": 1024, "Y": 8})
    params = {name: meta(fsdp_tp.SPECS[name], sizes, mesh, L) for name in ("W_in", "W_out")}
    In = meta(fsdp_tp.SPECS["In"], sizes, mesh)
    start = time.process_time()
    with peak_memory() as memory:
        Out, saved = fsdp_tp.forward(params, In, mesh)
        fsdp_tp.backward(torch.empty_like(Out), saved, params, mesh)
    assert time.process_time() - start < 10
    B, D, F, X, Y = *sizes.values(), 1024, 8
    events = [event for event, _, _ in memory.steps]
    nbytes = sum(e.nbytes * (2 if e.op == "AllReduce" else 1) for e in events if e.op not in ("Einsum", "Slice"))
    assert nbytes == L * (8 * B * D // X + 12 * D * F // Y)
    assert sum(e.flops for e in events) == L * 12 * B * D * F // (X * Y)
    weights = 2 * 2 * L * D * F // (X * Y)
    gathered = 2 * 2 * D * F // Y
    assert weights + gathered < memory.peak < 20 * gathered
    assert all(now <= peak <= memory.peak for _, now, peak in memory.steps)
