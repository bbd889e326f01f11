"""What torch would broadcast, wrap round or take for true, and what does not fit a mesh: refused with its fix."""
# ruff: noqa: F401 - calls in tables name what is imported

from functools import partial
from unittest.mock import patch

import pytest
import torch
from problems import SIGMOID, SOFTMAX, problem
from refused import evaluated, named, refused
from test_transformer_mesh import EXPERTS, PLAIN

from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.models.dropout import dropout
from scaling.schedules import make
from scaling.strategies import context, expert, one_device, transformer, zero
from scaling.strategies.collective_matmul import matmul_scatter
from scaling.strategies.stack import Strategy
from scaling.strategies.transformer.step import StepOptions, check_batch
from scaling.strategies.transformer.types import layers_of, schedule_of

MESH, META = Mesh({"X": 1, "C": 1}), {"device": "meta"}
IDS = torch.zeros(2, 4, dtype=torch.int64)


def specs(config, sizes, **options):
    return transformer.specs(config, AbstractMesh(sizes), **options)


def checked(config, sizes, remat="none", form="zigzag", compiling=False):
    """The batch IDS, as it is looked at before a step."""
    with patch.object(torch.compiler, "is_compiling", lambda: compiling):
        check_batch(IDS, IDS, StepOptions(remat=remat, context=form), config, AbstractMesh(sizes))


def step(tokens=IDS, config=PLAIN, **options):
    return transformer.loss_and_grads(model.init(config, 0), tokens, IDS, config, Mesh({"X": 1}), **options)


CAPACITY = EXPERTS.with_(capacity=1.5)
GRAPH = ", which a compiled graph cannot express\n  fix: run it without torch.compile"
REFUSED = {
    "specs(PLAIN, {'Q': 2})": "splits nothing of a Transformer",
    "specs(PLAIN.with_(N=6, K=2), {'Y': 4})": "N=6 query heads do not divide",
    "specs(PLAIN.with_(N=12, K=2), {'Y': 3})": "K=2 KV heads over Y=3", "specs(PLAIN, {'E': 2})": "E=1 experts",
    "specs(PLAIN.with_(D=18), {'X': 4})": "model dims do not divide into 4 blocks",
    "schedule_of(make('1f1b', 2, 4), AbstractMesh({'Z': 4}), 4)": "fix: make it with these",
    "transformer.shard(model.init(PLAIN, 0), PLAIN, AbstractMesh({'Z': 3}))": "L=2 layers cannot fill 3 stages",
    "layers_of(PLAIN.with_(E=2, dense_layers=1, F_dense=8), make('1f1b', 2, 4))": "L=1 layers after the dense ones",
    "step(loads=True, sums=torch.bfloat16)": "rounds large counts\n  fix: give sums=torch.float32",
    "step(IDS + PLAIN.V)": f"tokens must lie in 0..{PLAIN.V - 1}",
    "step(config=PLAIN.with_(dropout=0.1))": "draws random masks\n  fix: give seed=",
    "step(reduce='each', zero=0)": 'or reduce="once"',
    "checked(CAPACITY, {'X': 2, 'C': 2})": 'fix: choose context="ring"',
    "checked(PLAIN, {'Z': 2}, compiling=True)": f"stages wait for each other's messages{GRAPH}",
    "checked(EXPERTS, {'X': 1}, compiling=True)": f"experts get as many rows as choose them{GRAPH}",
}  # fmt: skip


def test_what_differs_little_from_what_is_refused():
    for kind in (0, 1, 2):
        assert "X" not in str(specs(PLAIN.with_(D=18), {"X": 4}, zero=kind))
    step(IDS + PLAIN.V - 1)
    checked(CAPACITY, {"X": 2, "C": 2}, form="ring")
    checked(CAPACITY, {"X": 2, "C": 1})
    checked(CAPACITY, {"X": 2})
    checked(EXPERTS, {"X": 2, "C": 2})
    checked(PLAIN, {"Z": 1, "X": 2}, compiling=True)
    stages, given = AbstractMesh({"X": 2, "Z": 2}), make("zb-h1", 2, 4)
    assert schedule_of(given, stages, 4) is given
    assert schedule_of(None, stages, 4) == make("1f1b", 2, 4)  # unless one is given


ROWS = torch.randn(2, 3, 4)
DROPS = [{"rate": rate} for rate in (1.0, 2.0, -0.5, float("nan"), "0.5")] + [{"x": ROWS.long()}, {"x": ROWS[0]}]
DROPS += [{"samples": torch.arange(1)}, {"positions": torch.arange(1)}, {"seed": 1.5}]
RIGHT = {"x": ROWS, "rate": 0.5, "seed": 3, "samples": torch.arange(2), "positions": torch.arange(3)}
CALLS = {f"{i} {' '.join(given)}": partial(dropout, branch="mlp", **RIGHT | given) for i, given in enumerate(DROPS)}

Q, K, V = (torch.randn(2, 8, heads, 4) for heads in (4, 2, 2))


def over_4(T=8, N=8, K=4, dtype=torch.bfloat16, **given):
    """On four ranks with so many tokens each, and heads."""
    Q, KV = torch.empty(1, T, N, 8, dtype=torch.bfloat16, **META), torch.empty(1, T, K, 8, dtype=dtype, **META)
    return context.attention(Q, KV, KV, AbstractMesh({"C": 4}), **given)


SPLIT = [{"axis": None}, {"axis": 3}, {"scale": 0.0}]
SPLIT += [{"segments": [[0] * 8] * 2}, {"segments": torch.zeros(2, 8, **META).long()}]
SIZES = [{"T": 24.0}, {"C": 0}, {"window": 0}, {"causal": "no"}]


REFUSED |= named("""
call                                        words of its error
over_4(7, 4, 2, form='zigzag')              fix: pad T to 32
over_4(8, 6, 2, form='ulysses')             N=6 query heads do not divide over 4 ranks
over_4(8, 6, 4)                             K divides N
over_4(form='usp')                          fix: axis=('C', 'Y')
over_4(axis=('C', 'Y'))                     fix: axis='C', or form='usp'
over_4(window=0)                            window = 0
over_4(segments=torch.zeros(1, 9, **META))  segments of shape
over_4(dtype=torch.float32)                 one dtype
context.work('rings', 24, 4)                form = 'rings': one of 'ring', 'zigzag'
""")
CALLS |= {f"work {given}": partial(context.work, "ring", **{"T": 24, "C": 4} | given) for given in SIZES}
CALLS |= {f"{i} {' '.join(given)}": partial(context.attention, Q, K, V, MESH, **given) for i, given in enumerate(SPLIT)}
REFUSED |= named("""
call                                  words of its error
context.to_zigzag(Q, 9, MESH)
context.from_zigzag(Q, '1', MESH)
context.to_zigzag(None, 1, MESH)
context.positions('zigzag', 7, MESH)
context.to_zigzag(torch.empty(3, **META), 0, AbstractMesh({'C': 2}))
context.positions('plain', 8, MESH)
context.positions('ring', -8, MESH)
""")
test_an_axis_that_the_mesh_has_not = refused(
    {"Q": partial(context.attention, Q, K, V, MESH, axis="Q")}, always="unknown mesh axis Q"
)


def routed(config=SOFTMAX, **spoiled):
    """A layer of experts, some of whose params are others, or missing."""
    params, x, _ = problem(SIGMOID if spoiled else SOFTMAX, "plain")
    return expert.moe(params | spoiled, x, config, Mesh({"X": 1}), "X")


def laid_out(axis="X", **layout):
    params, x, _ = problem(SOFTMAX, "plain")
    return expert.moe(params, x, SOFTMAX, AbstractMesh({"X": 3, "Y": 2}), axis, **layout)


REFUSED |= named(r"""
call                                         words of its error
laid_out()                                   8 experts do not divide over 3 ranks
laid_out('Y', spec='x[B_X, T, D]')           fix: split B over the experts' axes Y, too
laid_out('Y', tensor='Y')                    fix: split F over axes that split neither tokens nor experts, not Y
laid_out('Y', spec='x[B_Y, D]')              x[B_Y, D]\n  rule: the tokens of a layer
laid_out('Y', spec='x[B_Y, T, D_X]')         x[B_Y, T, D_X]\n  rule: the tokens of a layer
routed(SIGMOID, W_gate=None)                 params["W_gate"]: missing
routed(SIGMOID, shared=None)                 params["shared"]["W_gate"]: missing
routed(SIGMOID, W_out=torch.zeros(8, 9, 6))  params["W_out"]: W_out[E_X, F, D] has the shape
routed(SIGMOID, bias=torch.zeros(1))         params["bias"]: bias[E] has the shape
routed(PLAIN)                                has the shape
""")

SPECS = {"In": "In[B, D]", "W": "W[D, D2]", "Out": "Out[B, D]"}
EYE = torch.eye(2)  # as many rows as a listing returns parts: an array alone would be taken apart into its rows
NONE, TWO = EYE[None][:0], EYE.expand(2, 2, 2)


def listed(swapped=False, **functions):
    """A listing of one layer, forward and backward, with other functions than the right ones."""
    right = {
        "layer_forward": lambda W, In, mesh, block: (In @ W, In),
        "layer_backward": lambda W, dOut, saved, mesh, block: (dOut @ W.T, saved.T @ dOut),
        "gather": lambda W, mesh: (W,),
        "reduce": lambda dW, mesh: (dW,),
    }
    strategy, params, mesh = Strategy(SPECS, **right | functions), {"W": EYE[None]}, Mesh({"X": 1})
    Out, saved = strategy.forward(params, EYE, mesh)
    given = (params, saved) if swapped else (saved, params)
    return Out, *strategy.backward(EYE, *given, mesh)


def test_a_listing_as_it_should_be():
    Out, dIn, grads = listed()
    assert all(torch.equal(found, EYE) for found in (Out, dIn, grads["W"][0]))
    assert one_device.forward({"W_in": NONE, "W_out": NONE}, EYE, Mesh({}))[0] is EYE


def gives(**functions):
    """Each function of the listing with another result."""
    return listed(**{name: lambda *_, result=result: result for name, result in functions.items()})


REFUSED |= {
    "gives(layer_forward=EYE)": "forward returned a Tensor\n  fix: return a tuple of 2: Out, saved",
    "gives(layer_backward=EYE)": "backward returned a Tensor\n  fix: return a tuple of 2: dIn, dW",
    "gives(layer_backward=(EYE,))": "backward returned a tuple of 1\n",
    "gives(layer_backward=(EYE, EYE[0]))": "dW of shape (2,), not (2, 2)\n  fix: ",
    "gives(gather=EYE)": "gather returned a Tensor\n  fix: return a tuple of 1: W",
    "gives(reduce=EYE)": "reduce returned a Tensor\n  fix: return a tuple of 1: W",
    "gives(reduce_slow=None)": "reduce_slow returned a NoneType\n",
    "listed(swapped=True)": "saved is a dict, not what forward returned\n  fix: Out, saved = forward",
    "one_device.forward({'W': EYE[None]}, EYE, Mesh({}))": "fix: give SPECS a type, and params",
    "one_device.forward({'W_in': EYE[None], 'W_out': TWO}, EYE, Mesh({}))":
        "fix: stack all of them over the same layers",
    "one_device.forward({'W_in': NONE, 'W_out': NONE}, EYE, Mesh({}), 'tanh')": "'tanh'",
    "zero.backward(EYE, None, {}, Mesh({}), stage=3)": "fix: for stage 3 use scaling.strategies.fsdp",
    "matmul_scatter(torch.empty(2, 3, **META), torch.empty(3, 6, **META), AbstractMesh({'Y': 4}))": "multiple of 4",
}  # fmt: skip
test_refused = refused(evaluated(REFUSED, globals()) | CALLS)
