"""What torch would broadcast, wrap round or take for true, and what does not fit a mesh: refused with its fix."""

from functools import partial

import pytest
import torch
from misuse import rooms
from problems import SIGMOID, SOFTMAX, problem
from refused import refused
from test_transformer_mesh import EXPERTS, PLAIN

from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.models.dropout import dropout
from scaling.schedules import make
from scaling.strategies import context, expert, one_device, transformer, zero
from scaling.strategies.collective_matmul import matmul_scatter
from scaling.strategies.stack import Strategy
from scaling.strategies.transformer.api import check_batch
from scaling.strategies.transformer.ends import loss as loss_of
from scaling.strategies.transformer.stages import resolved
from scaling.strategies.transformer.step import AskedStep

MESH, NAN, META = Mesh({"X": 1, "C": 1}), float("nan"), {"device": "meta"}
G = torch.Generator().manual_seed(0)
IDS = torch.zeros(2, 4, dtype=torch.int64)


def specs(config, sizes, **options):
    return lambda: transformer.specs(config, AbstractMesh(sizes), **options)


def checked(config, sizes, remat="none", form="zigzag", compiling=False):
    """The batch IDS, as it is looked at before a step."""

    def call():
        with pytest.MonkeyPatch.context() as patched:
            if compiling:
                patched.setattr(torch.compiler, "is_compiling", lambda: True)
            check_batch(IDS, IDS, AskedStep(config, remat, context=form, backward=False), AbstractMesh(sizes))

    return call


def step(tokens=IDS, config=PLAIN, **options):
    return lambda: transformer.loss_and_grads(model.init(config, 0), tokens, IDS, config, Mesh({"X": 1}), **options)


CAPACITY = EXPERTS.with_(capacity=1.5)
GRAPH = ", which a compiled graph cannot express\n  fix: run it without torch.compile"
test_a_transformer = refused(
    {
        "an axis it has not": (specs(PLAIN, {"Q": 2}), "splits nothing of a Transformer"),
        "query heads": (specs(PLAIN.with_(N=6, K=2), {"Y": 4}), "N=6 query heads do not divide"),
        "few KV heads": (specs(PLAIN.with_(N=12, K=2), {"Y": 3}), "K=2 KV heads over Y=3"),
        "no experts": (specs(PLAIN, {"E": 2}), "E=1 experts"),
        "model dims": (specs(PLAIN.with_(D=18), {"X": 4}), "model dims do not divide into 4 blocks"),
        "a schedule of other stages": (
            lambda: resolved(make("1f1b", 2, 4), AbstractMesh({"Z": 4}), 4),
            "fix: make it with these",
        ),
        "more stages than layers": (
            lambda: transformer.shard(model.init(PLAIN, 0), PLAIN, AbstractMesh({"Z": 3})),
            "L=2 layers cannot fill 3 stages",
        ),
        "tokens beyond": (step(IDS + PLAIN.V), f"tokens must lie in 0..{PLAIN.V - 1}"),
        "experts run again in part": (step(config=EXPERTS, remat="matmuls"), "cannot be used with experts"),
        "a capacity in another order": (checked(CAPACITY, {"X": 2, "C": 2}), 'fix: choose context="ring"'),
        "stages in a graph": (
            checked(PLAIN, {"Z": 2}, compiling=True),
            f"stages wait for each other's messages{GRAPH}",
        ),
        "experts in a graph": (
            checked(EXPERTS, {"X": 1}, compiling=True),
            f"experts get as many rows as choose them{GRAPH}",
        ),
    }
)


def test_what_differs_little_from_what_is_refused():
    for kind in (0, 1, 2):
        assert "X" not in str(specs(PLAIN.with_(D=18), {"X": 4}, zero=kind)())
    step(IDS + PLAIN.V - 1)()
    checked(CAPACITY, {"X": 2, "C": 2}, form="ring")()
    checked(CAPACITY, {"X": 2, "C": 1})()
    checked(CAPACITY, {"X": 2})()
    checked(EXPERTS, {"X": 2, "C": 2})()
    checked(PLAIN, {"Z": 1, "X": 2}, compiling=True)()


HIDDEN, UNEMBED, TARGETS = torch.randn(2, 6, 5), torch.randn(5, 8), torch.zeros(2, 6, dtype=torch.int64)


def ends(**changed):
    return lambda: loss_of(
        **{"hidden": HIDDEN, "unembed": UNEMBED, "targets": TARGETS, "mesh": Mesh({}), "weights": None} | changed
    )


test_the_loss = refused(
    {
        "hidden": (ends(hidden=HIDDEN[..., :4]), "rule: hidden"),
        "V": (ends(V=9), "rule: the parts hold"),
        "weights": (ends(weights=torch.ones(1, 6)), "weights must be"),
        "targets": (ends(targets=TARGETS + 8), "0..7"),
        "smoothing": (ends(label_smoothing=-1.0), "label_smoothing"),
        "chunks": (ends(chunk_bytes=0), "chunk_bytes"),
    }
)

ROWS = torch.randn(2, 3, 4, generator=G)
DROPS = [{"rate": rate} for rate in (1.0, 2.0, -0.5, NAN, "0.5")]
DROPS += [{"samples": torch.arange(1)}, {"positions": torch.arange(1)}, {"x": ROWS.long()}, {"x": ROWS[0]}]
DROPS += [{"seed": 1.5}]


def drop(x=ROWS, **given):
    places = {"samples": torch.arange(2), "positions": torch.arange(3)}
    return dropout(x, "attention", **{"rate": 0.5, "seed": 3} | places | given)


test_dropout = refused({f"{i} {' '.join(given)}": partial(drop, **given) for i, given in enumerate(DROPS)})

Q, K, V = (torch.randn(2, 8, heads, 4, generator=G) for heads in (4, 2, 2))


def attend(Q=Q, K=K, V=V, **given):
    return context.attention(Q, K, V, MESH, **given)


def over_4(T=8, N=8, K=4, dtype=torch.bfloat16, **given):
    """On four ranks with so many tokens each, and heads."""
    Q, KV = torch.empty(1, T, N, 8, dtype=torch.bfloat16, **META), torch.empty(1, T, K, 8, dtype=dtype, **META)
    return lambda: context.attention(Q, KV, KV, AbstractMesh({"C": 4}), **given)


def work(T=24, C=4, form="ring", **given):
    return lambda: context.work(form, T, C, **given)


SPLIT = [{"axis": None}, {"axis": 3}, {"scale": 0.0}]
SPLIT += [{"segments": [[0] * 8] * 2}, {"segments": torch.zeros(2, 8, **META).long()}]
SIZES = [{"T": 24.0}, {"C": 0}, {"window": 0}, {"causal": "no"}]


@pytest.mark.parametrize("name", ["attention", "experts"])
def test_no_argument_that_is_spoiled_gives_a_wrong_number(name):
    """Arrays, params and numbers, drawn: the right calls beside `misuse.plain`, the others refused."""
    outcomes, failures = rooms.spoiled(name, 150)
    assert not failures, "\n\n".join(failures)
    assert len(outcomes) == 2  # right and refused


test_attention_over_a_split_sequence = refused(
    {f"{i} {' '.join(given)}": partial(attend, **given) for i, given in enumerate(SPLIT)}
    | {f"work {given}": work(**given) for given in SIZES}
    | {
        "an odd number of tokens": (over_4(7, 4, 2, form="zigzag"), "fix: pad T to 32"),
        "heads": (over_4(8, 6, 2, form="ulysses"), "N=6 query heads do not divide over 4 ranks"),
        "groups": (over_4(8, 6, 4), "K divides N"),
        "one axis": (over_4(form="usp"), "fix: axis=('C', 'Y')"),
        "two axes": (over_4(axis=("C", "Y")), "fix: axis='C', or form='usp'"),
        "window": (over_4(window=0), "window=0"),
        "segments": (over_4(segments=torch.zeros(1, 9, **META)), "segments of shape"),
        "dtypes": (over_4(dtype=torch.float32), "one dtype"),
        "a form": (work(form="rings"), "no form 'rings'\n  fix: choose one of ring, zigzag"),
        "a dim beyond": lambda: context.to_zigzag(Q, 9, MESH),
        "a dim by name": lambda: context.from_zigzag(Q, "1", MESH),
        "no tensor": lambda: context.to_zigzag(None, 1, MESH),
        "an odd half": lambda: context.positions("zigzag", 7, MESH),
        "an odd half of two": lambda: context.to_zigzag(torch.empty(3, **META), 0, AbstractMesh({"C": 2})),
        "positions of no form": lambda: context.positions("plain", 8, MESH),
        "positions below 0": lambda: context.positions("ring", -8, MESH),
    }
)
test_an_axis_that_the_mesh_has_not = refused({"Q": partial(attend, axis="Q")}, always="unknown mesh axis Q")


def routed(config=SOFTMAX, sizes=None, axis="X", options=None, **spoiled):
    """A layer of experts, some of whose params are others, or missing."""
    params, x, _ = problem(config, "plain")
    mesh = AbstractMesh(sizes) if sizes else Mesh({"X": 1})
    return lambda: expert.moe(params | spoiled, x, config, mesh, axis, **(options or {}))


BIG = {"X": 3, "Y": 2}
test_experts = refused(
    {
        "that do not divide": (routed(sizes=BIG), "8 experts do not divide over 3 ranks"),
        "over another axis": (
            routed(sizes=BIG, axis="Y", options={"spec": "x[B_X, T, D]"}),
            "fix: split B over the experts' axes Y, too",
        ),
        "and features": (
            routed(sizes=BIG, axis="Y", options={"tensor": "Y"}),
            "fix: split F over axes that split neither tokens nor experts, not Y",
        ),
        "of two dims": (routed(sizes=BIG, axis="Y", options={"spec": "x[B_Y, D]"}), "rule: the tokens of a layer"),
        "of split dims": (routed(sizes=BIG, axis="Y", options={"spec": "x[B_Y, T, D_X]"}), "rule: the tokens of a"),
        "without a gate": (routed(SIGMOID, W_gate=None), 'params["W_gate"]: missing'),
        "without the shared": (routed(SIGMOID, shared=None), 'params["shared"]["W_gate"]: missing'),
        "wider": (
            routed(SIGMOID, W_out=torch.zeros(8, 9, 6)),
            'params["W_out"]: W_out[E_X, F, D] has the shape',
        ),
        "swapped": routed(W_out=problem(SOFTMAX, "plain")[0]["W_in"]),
        "one bias for all": routed(bias=torch.zeros(1)),
        "of another config": lambda: expert.moe(problem(SOFTMAX, "plain")[0], ROWS, PLAIN, Mesh({"X": 1}), "X"),
    }
)

SPECS = {"In": "In[B, D]", "W": "W[D, D2]", "Out": "Out[B, D]"}
EYE = torch.eye(2)  # as many rows as a listing returns parts: an array alone would be taken apart into its rows


def listed(swapped=False, **functions):
    """A listing of one layer, forward and backward, with other functions than the right ones."""
    right = {
        "layer_forward": lambda W, In, mesh, block: (In @ W, In),
        "layer_backward": lambda W, dOut, saved, mesh, block: (dOut @ W.T, saved.T @ dOut),
        "gather": lambda W, mesh: (W,),
        "reduce": lambda dW, mesh: (dW,),
    }
    strategy, params, mesh = Strategy(SPECS, **right | functions), {"W": EYE[None]}, Mesh({"X": 1})

    def call():
        Out, saved = strategy.forward(params, EYE, mesh)
        given = (params, saved) if swapped else (saved, params)
        return Out, *strategy.backward(EYE, *given, mesh)

    return call


def test_a_listing_as_it_should_be():
    Out, dIn, grads = listed()()
    assert torch.equal(Out, EYE)
    assert torch.equal(dIn, EYE)
    assert torch.equal(grads["W"], EYE[None])


def with_(name, function, words):
    return listed(**{name: function}), words


test_a_listing_returns_as_many_parts_as_specs_names = refused(
    {
        "Out": with_(
            "layer_forward",
            lambda W, In, *_: In @ W,
            "forward returned a Tensor\n  fix: return a tuple of 2: Out, saved",
        ),
        "dIn": with_(
            "layer_backward",
            lambda W, dOut, *_: dOut,
            "backward returned a Tensor\n  fix: return a tuple of 2: dIn, dW",
        ),
        "dIn,": with_("layer_backward", lambda W, dOut, *_: (dOut,), "backward returned a tuple of 1\n"),
        "dW": with_("layer_backward", lambda W, dOut, *_: (dOut, dOut[0]), "dW of shape (2,), not (2, 2)\n  fix: "),
        "W": with_("gather", lambda W, mesh: W, "gather returned a Tensor\n  fix: return a tuple of 1: W"),
        "reduced": with_("reduce", lambda dW, mesh: dW, "reduce returned a Tensor\n  fix: return a tuple of 1: W"),
        "slowly": with_("reduce_slow", lambda dW, mesh: None, "reduce_slow returned a NoneType\n"),
        "another name": (
            lambda: one_device.forward({"W": EYE[None]}, EYE, Mesh({})),
            "fix: give SPECS a type, and params",
        ),
        "another depth": (
            lambda: one_device.forward({"W_in": EYE[None], "W_out": EYE.expand(2, 2, 2)}, EYE, Mesh({})),
            "fix: stack all of them over the same layers",
        ),
        "an activation": (
            lambda: one_device.forward({"W_in": EYE[None][:0], "W_out": EYE[None][:0]}, EYE, Mesh({}), "tanh"),
            "'tanh'",
        ),
        "a third stage": (
            lambda: zero.backward(EYE, None, {}, Mesh({}), stage=3),
            "fix: for stage 3 use scaling.strategies.fsdp",
        ),
        "swapped": (listed(swapped=True), "saved is a dict, not what forward returned\n  fix: Out, saved = forward"),
        "a part that does not divide": (
            lambda: matmul_scatter(torch.empty(2, 3, **META), torch.empty(3, 6, **META), AbstractMesh({"Y": 4})),
            "multiple of 4",
        ),
    }
)
