"""Each thing of torch that has no public name: that it is there and does what the collectives rely on."""

import os
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from machine import share_gloo_device
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import scaling
from scaling import launch
from scaling.common import torch_private as p

PRIVATE = re.compile(  # torch.__version__ is public
    r"torch(\.\w+)*\._[a-z]|_dynamo|functorch\.|c10d\._|pg\._|\b_foreach|\._lazy|\._fused|_cdata|_inductor"
    r"|from torch[\w.]* import _"
)


def test_it_all_stands_in_one_file():
    root = Path(scaling.__file__).parent
    found = {file for file in root.rglob("*.py") if PRIVATE.search(file.read_text(encoding="utf-8"))}
    strided = root / "spec" / "types.py"  # _StridedShard: types have no torch at import
    assert found == {root / "common" / "torch_private.py", strided}


def test_transforms_and_modes_are_seen():
    seen = []

    def f(x):
        seen.append((p.in_transform() is not None, p.modes()))
        return x.sum()

    f(torch.ones(2))
    torch.func.grad(f)(torch.ones(2))
    torch.func.vmap(f)(torch.ones(2, 2))
    with warnings.catch_warnings():  # torch's own, of its tracer
        warnings.simplefilter("ignore")
        torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
    with FlopCounterMode(display=False):
        f(torch.ones(2))
    make_fx(f)(torch.ones(2))
    assert [inside for inside, _ in seen] == [False, True, True, True, False, False]
    assert [modes > 0 for _, modes in seen] == [False, False, False, False, True, True]
    assert (p.in_transform(), p.modes()) == (None, 0)


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
        for how, write in writes.items():
            for first in ("the operand", "the clone"):
                x = OPERANDS[name]()
                y, kept = p.lazy_clone(x), x.detach().clone()
                assert type(y) is torch.Tensor
                assert y.stride() == x.stride()
                assert torch.equal(y, kept)
                write(x if first == "the operand" else y)
                other = y if first == "the operand" else x
                assert torch.equal(other, kept), f"{how} to {first}"
    assert p.lazy_clone(torch.ones(2, device="meta")).is_meta


def test_a_lazy_clone_of_torch_s_own_memory_copies_nothing_until_it_is_written_to():
    x = torch.arange(6.0)
    y = p.lazy_clone(x)
    lazy = torch._C._is_cow_tensor
    assert lazy(y)
    torch.mm(torch.ones(1, 2), y.view(2, 3))
    assert [lazy(z) for z in (y, x.clone())] == [True, False]


def test_the_fused_kernel_is_adamw():
    g = torch.Generator().manual_seed(0)
    params, grads = ([torch.randn(5, generator=g), torch.randn(2, 3, generator=g)] for _ in range(2))
    theirs = [torch.nn.Parameter(x.clone()) for x in params]
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, fused=True)
    m, v = ([torch.zeros_like(x) for x in params] for _ in range(2))
    options = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.2}
    for t in (1, 2):
        for x, grad in zip(theirs, grads, strict=True):
            x.grad = grad.clone()
        reference.step()
        count, rate = torch.tensor(float(t)), 0.1 if t == 1 else torch.tensor(0.1, dtype=torch.float64)
        p.fused_adamw_(params, grads, m, v, count, lr=rate, **options)
        assert count == t, "the count is not counted up"
        for a, b in zip(params, theirs, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-7)


def test_the_kernel_of_a_norm():
    """Its backward runs on GPUs alone, where gpu_equal.py holds it against the lines: here that it takes these."""
    x, gain = torch.randn(3, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    y, r = p.fused_norm(x, gain, 0.1)
    torch.testing.assert_close(r, 1 / (x.square().mean(-1, keepdim=True) + 0.1).sqrt())
    torch.testing.assert_close(y, x * r * gain)
    dx, dgain = p.fused_norm_vjp(*(each.to("meta") for each in (x, gain, r, y)))
    assert (dx.shape, dgain.shape) == (x.shape, gain.shape)


def traceable(mesh):
    group, n, r = mesh.group(("X",)), mesh.size(), mesh.rank
    assert p.process_group(group.name) is group.pg
    x = torch.arange(float(2 * n)).view(n, 2).t().contiguous().t() + 10 * r  # stored by columns
    kept, everyone = x.clone(), [torch.arange(float(2 * n)).view(n, 2) + 10 * i for i in range(n)]
    mine, ones = torch.cat([whole[r : r + 1] for whole in everyone]), [1] * n
    sends, receives = ([n * (i == (r + step) % n) for i in range(n)] for step in (1, -1))  # all rows to the next rank
    cases = {  # traced, and eager into a tensor that is there
        "the sum": (lambda x: p.sum_over(x, group.name), None, sum(everyone)),
        "gathered": (lambda x: p.gather_over(x, n, group.name), p.gather_into, torch.cat(everyone)),
        "the sum, scattered": (
            lambda x: p.scatter_sum_over(x, n, group.name), p.scatter_sum_into, sum(everyone)[r : r + 1]
        ),
        "exchanged": (lambda x: p.exchange_over(x, ones, ones, group.name), p.exchange_into, mine),
        "uneven": (
            lambda x: p.exchange_over(x, receives, sends, group.name),
            partial(p.exchange_into, receives=receives, sends=sends),
            everyone[r - 1],
        ),
    }  # fmt: skip
    for name, (call, into, wanted) in cases.items():
        assert torch.equal(call(x), wanted), name
        assert torch.equal(x, kept), name
        graph = make_fx(call)(x)
        assert torch.equal(graph(x), wanted), f"{name}, traced"
        for node in graph.graph.nodes:
            if "_c10d_functional" in str(node.target):
                assert node.is_impure(), f"{name}: what computes constants ahead must leave {node.target} alone"
        if into:
            out = torch.empty(wanted.shape)
            into(out, x.contiguous(), pg=group.pg).wait()
            assert torch.equal(out, wanted), f"{name}, into a tensor"
    assert isinstance(group.pg, dist.ProcessGroup)


def test_levels_of_transforms():
    seen = []

    def look(x):
        seen.append((p.is_wrapped(x), p.level_of(x), p.is_wrapped(p.unwrapped(x))))
        return x

    torch.vmap(look)(torch.zeros(2))
    assert seen == [(True, 1, False)]
    assert not p.is_wrapped(torch.zeros(2))


class Refuses(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError("called")


def test_without_functions():
    x = torch.zeros(2)
    with Refuses(), p.without_functions():
        assert (x + 1).tolist() == [1, 1]


def test_collectives_of_shards(ranks):
    ranks(traceable, {"X": 2})


def threads_of_groups(mesh, shared: bool) -> tuple[int, float]:
    """How many threads four more groups of both ranks bring, and a sum over the last of them."""
    if shared:
        share_gloo_device()
    before = len(os.listdir("/proc/self/task"))
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    x = torch.ones(1)
    dist.all_reduce(x, group=groups[-1])
    return len(os.listdir("/proc/self/task")) - before, x.item()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_gloo_groups_share_a_device():
    each, one = (launch.run(threads_of_groups, {"X": 2}, shared) for shared in (False, True))
    assert [total for _, total in each + one] == [2.0] * 4
    assert [a - b for (a, _), (b, _) in zip(each, one, strict=True)] == [4, 4]


def test_a_storage_has_one_key():
    for device in ("cpu", "meta"):
        x, y = torch.ones(4, device=device), torch.ones(4, device=device)
        keys = [p.storage_of(z) for z in (x, x.view(2, 2), x[1:], y)]
        assert keys[:3] == [keys[0]] * 3 != keys[1:]


def test_flash_attention_and_its_gradients_are_softmaxs():
    g = torch.Generator().manual_seed(0)
    q, k, v, dO = (torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=g) for _ in range(4))
    O, lse = p.flash_cpu(q, k, v, 0.0, True)
    found = p.flash_cpu_backward(dO, q, k, v, O, lse, 0.0, True)

    def plain(q, k, v):
        scores = (q @ k.mT / 2).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    wanted, vjp = torch.func.vjp(plain, q, k, v)
    torch.testing.assert_close((O, *found), (wanted, *vjp(dO)), rtol=1e-12, atol=1e-12)


def test_a_profiler_is_noticed():
    assert not p.profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        assert p.profiling()
    assert not p.profiling()


def test_an_assertion_on_a_tensor():
    p.assert_later(torch.tensor([1, 2]).gt(0).all(), "above 0")
    with pytest.raises(RuntimeError, match="above 0"):
        p.assert_later(torch.tensor([1, -2]).gt(0).all(), "above 0")


def test_the_compiler_is_imported():
    p.import_compiler()
    assert "torch._dynamo" in sys.modules


def test_graphs_of_both_passes():
    forward, backward = p.aot_graphs(lambda x: (x * x).sin(), torch.ones(2, requires_grad=True))
    names = [{str(node.target).partition(".")[2] for node in graph.nodes} for graph in (forward, backward)]
    assert "sin.default" in names[0]
    assert "cos.default" in names[1]


def test_a_place_in_a_checkpoint():
    place = p.checkpoint_place("0.pt", 3, 5)
    assert (place.relative_path, place.offset, place.length) == ("0.pt", 3, 5)


def test_gradients_are_autograd_s_own():
    W, x, unused = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results, cotangents = [W @ x, (W * x).sum(0)], [torch.randn(3, 3).double(), torch.randn(3).double()]
    wanted = torch.autograd.grad(results, [W, x, unused], cotangents, allow_unused=True, retain_graph=True)
    found = p.tape_gradients(results, [W, x, unused], cotangents)
    assert found[2] is None is wanted[2]
    assert all(torch.equal(a, b) for a, b in zip(found[:2], wanted[:2], strict=True))


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
