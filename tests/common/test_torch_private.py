"""Things of torch that have no public name: that they are there and do what is relied on, where no test of what uses
them would say so."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machine import on_ranks
from torch.fx.experimental.proxy_tensor import make_fx

import scaling
from scaling.common import torch_private as p

PRIVATE = re.compile(  # torch.__version__ is public
    r"torch(\.\w+)*\._[a-z]|_dynamo|functorch\.|c10d\._|pg\._|\b_foreach|\._lazy|\._fused|_cdata|_inductor"
    r"|from torch[\w.]* import _"
)


def test_private_names_of_torch_are_in_one_file():
    root = Path(scaling.__file__).parent
    found = {file for file in root.rglob("*.py") if PRIVATE.search(file.read_text(encoding="utf-8"))}
    strided = root / "spec" / "types.py"  # _StridedShard: types have no torch at import
    assert found == {root / "common" / "torch_private.py", strided}


def test_a_constant_is_computed_once_while_compiling():
    torch._dynamo.reset()
    calls = []

    @p.constant
    def length(word):
        calls.append(word)
        return len(sorted(word))

    compiled = torch.compile(lambda x: x * length("three"), backend="eager", fullgraph=True)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
    assert len(calls) == 1


OPERANDS = {
    "of torch": lambda: torch.arange(6.0),
    "a view": lambda: torch.arange(12.0).view(2, 6)[1],
    "turned": lambda: torch.arange(6.0).view(2, 3).t(),
    "of numpy": lambda: torch.from_numpy(torch.arange(6.0).numpy().copy()),
    "shared with processes": lambda: torch.arange(6.0).share_memory_(),
    "of bytes": lambda: torch.frombuffer(bytearray(24), dtype=torch.float32),
    "empty": lambda: torch.ones(0, 3),
    "a param": lambda: torch.nn.Parameter(torch.arange(6.0)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_a_lazy_clone_is_a_clone(name):
    """Whichever of the two is written to first, and by whatever writes, the other keeps its values."""
    writes = {
        "in place": lambda x: x.add_(1),
        "out": lambda x: torch.mul(x, 2, out=x),
        "a view of it": lambda x: x[:1].fill_(7),
        "numpy": lambda x: x.numpy().fill(3),
    }
    with torch.no_grad():
        for how, first in itertools.product(writes, ("the operand", "the clone")):
            x = OPERANDS[name]()
            y, kept = p.lazy_clone(x), x.detach().clone()
            assert type(y) is torch.Tensor
            assert y.stride() == x.stride()
            assert torch.equal(y, kept)
            written, other = (x, y) if first == "the operand" else (y, x)
            writes[how](written)
            assert torch.equal(other, kept), f"{how} to {first}"
    assert p.lazy_clone(torch.ones(2, device="meta")).is_meta


def test_a_lazy_clone_of_torch_s_own_memory_copies_nothing_until_it_is_written_to():
    x = torch.arange(6.0)
    y = p.lazy_clone(x)
    lazy = torch._C._is_cow_tensor
    assert lazy(y)
    torch.mm(torch.ones(1, 2), y.view(2, 3))
    assert [lazy(z) for z in (y, x.clone())] == [True, False]


def test_the_kernel_of_a_norm():
    """Its backward runs on GPUs alone, where gpu_equal.py holds it against the lines: here that it takes these."""
    x, gain = torch.randn(3, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    y, r = p.fused_norm(x, gain, 0.1)
    torch.testing.assert_close(r, 1 / (x.square().mean(-1, keepdim=True) + 0.1).sqrt())
    torch.testing.assert_close(y, x * r * gain)
    dx, dgain = p.fused_norm_vjp(*(each.to("meta") for each in (x, gain, r, y)))
    assert (dx.shape, dgain.shape) == (x.shape, gain.shape)


def test_flash_attention_of_gpus():
    """It runs on GPUs alone, where gpu_equal.py holds it against the CPU's: here that it takes and gives the same."""
    q, k, v, dO = (torch.empty(2, 3, T, 8, dtype=torch.bfloat16, device="meta") for T in (5, 7, 7, 5))
    given = {"scale": 0.1}
    assert not p.takes_flash(q)
    O, lse = p.flash_gpu(q, k, v, 0.0, False, **given)
    grads = p.flash_gpu_backward(dO, q, k, v, O, lse, 0.0, False, **given)
    same = *p.flash_cpu(q, k, v, 0.0, False, **given), *p.flash_cpu_backward(dO, q, k, v, O, lse, 0.0, False, **given)
    assert [(x.shape, x.dtype) for x in (O, lse, *grads)] == [(x.shape, x.dtype) for x in same]


@on_ranks({"X": 2})
def test_collectives_of_shards(mesh):
    """Their numbers are held where a compiler follows the typed calls."""
    group, x, ones = mesh.group(("X",)), torch.arange(4.0).view(2, 2), [1, 1]
    assert p.process_group(group.name) is group.pg
    calls = {
        "the sum": lambda x: p.sum_over(x, group.name),
        "gathered": lambda x: p.gather_over(x, 2, group.name),
        "the sum, scattered": lambda x: p.scatter_sum_over(x, 2, group.name),
        "exchanged": lambda x: p.exchange_over(x, ones, ones, group.name),
    }
    for name, call in calls.items():
        graph = make_fx(call)(x)
        assert torch.equal(graph(x), call(x)), name
        sent = [node for node in graph.graph.nodes if "_c10d_functional" in str(node.target)]
        assert sent, name
        for node in sent:
            assert node.is_impure(), f"{name}: what computes constants ahead must leave {node.target} alone"


def test_a_profiler_is_noticed():
    assert not p.profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert p.profiling()
    assert not p.profiling()


def test_an_assertion_on_a_tensor():
    p.assert_later(torch.tensor([1, 2]).gt(0).all(), "above 0")
    with pytest.raises(RuntimeError, match="above 0"):
        p.assert_later(torch.tensor([1, -2]).gt(0).all(), "above 0")


def test_graphs_of_both_passes():
    forward, backward = p.aot_graphs(lambda x: (x * x).sin(), torch.ones(2, requires_grad=True))
    names = [{str(node.target).partition(".")[2] for node in graph.nodes} for graph in (forward, backward)]
    assert "sin.default" in names[0]
    assert "cos.default" in names[1]


def test_a_leaf_that_is_not_used_has_no_gradient():
    x, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    dx, nothing = p.tape_gradients([3 * x], [x, unused], [torch.ones(2)])
    assert (dx.tolist(), nothing) == ([3.0, 3.0], None)


@pytest.mark.slow
def test_a_first_step_imports_neither_compiler_nor_sympy():
    """Which would cost each rank of a run that is started again a second and more."""
    script = """
import sys
from scaling.configs import get
from scaling.mesh import Mesh
from scaling.plan.transformer_step import transformer_step
from scaling.train.settings import Settings
settings = Settings(get("tiny").with_(L=1, D=8, F=8, N=1, K=1, H=8, V=8), "", "", batch=1, seq=4)
transformer_step(settings, Mesh({"X": 1}))()
assert not sys.modules.keys() & {"sympy", "torch._dynamo"}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
