"""All modules of torch.nn under data parallelism: each computes on two ranks what one device computes, in results and
gradients, or is refused in words."""

import random  # noqa: F401 - a call in WORDS names it
from functools import partial

import pytest
import torch
from machine import on_ranks
from refused import evaluated, named, refused
from torch import nn
from torch.func import functional_call, grad

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.models.dropout import dropout
from scaling.strategies.stateless import call, parameters, reduce_grads
from scaling.trace import trace

TWO, FOUR = on_ranks({"X": 2}), on_ranks({"X": 2, "Y": 2})
B = 4  # rows
FLAT, SEQ = (B, 6), (B, 3, 6)
IMAGES = {"1d": (B, 3, 8), "2d": (B, 3, 8, 8), "3d": (B, 3, 8, 8, 8)}
NOT_CALLED = "Module Container Sequential ModuleList ModuleDict ParameterList ParameterDict".split()  # noqa: SIM905
# arguments, by the beginning of a module's name that ends in 1d, 2d or 3d
OF_IMAGES = named(
    """
name begins with  arguments
Conv          (3, 4, 3)
MaxPool       (2,)
AvgPool       (2,)
Adaptive      (2,)
LPPool        (2, 2)
BatchNorm     (3,)
InstanceNorm  (3,)
Reflection    (1,)
Replication   (1,)
Zero          (1,)
Constant      (1, 0.5)
Circular      (1,)
Upsampling    (16,)
Dropout       ()
Softmax       ()
CrossMapLRN   (2,)
""",
    globals(),
)
# names: arguments, shapes of the operands; an int n: indices below n
TABLE = """
Softmax Softmin LogSoftmax: (1,), FLAT
Linear: (6, 4), FLAT
Bilinear: (6, 5, 4), FLAT, (B, 5)
Embedding: (7, 6), 7
EmbeddingBag: (7, 6), 7
GroupNorm: (3, 6), FLAT
LayerNorm: (6,), FLAT
RMSNorm: (6,), FLAT
LocalResponseNorm: (2,), IMAGES["2d"]
SyncBatchNorm: (3,), IMAGES["2d"]
Threshold: (0.1, 0.2), FLAT
RNN: (6, 5, 1, "tanh", True, True), SEQ
LSTM: (6, 5, 1, True, True), SEQ
GRU: (6, 5, 1, True, True), SEQ
RNNCell LSTMCell GRUCell: (6, 5), FLAT
MultiheadAttention: (6, 2, 0.0, True, False, False, None, None, True), SEQ, SEQ, SEQ
Transformer: (6, 2, 1, 1, 8, 0.0, "relu", None, None, 1e-5, True), SEQ, SEQ
TransformerEncoderLayer: (6, 2, 8, 0.0, "relu", 1e-5, True), SEQ
TransformerDecoderLayer: (6, 2, 8, 0.0, "relu", 1e-5, True), SEQ, SEQ
TransformerEncoder: (nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1), SEQ
TransformerDecoder: (nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True), 1), SEQ, SEQ
PixelShuffle: (2,), (B, 4, 3, 3)
PixelUnshuffle: (2,), IMAGES["2d"]
ChannelShuffle: (3,), IMAGES["2d"]
Upsample: (None, 2.0), IMAGES["2d"]
Fold: ((4, 4), 2, 1, 0, 2), (B, 12, 4)
Unfold: (2,), IMAGES["2d"]
Flatten: (), SEQ
Unflatten: (1, (2, 3)), FLAT
CosineSimilarity: (), FLAT, FLAT
PairwiseDistance: (), FLAT, FLAT
FractionalMaxPool2d: (2, 2), IMAGES["2d"]
Softmax2d: (), IMAGES["2d"]
FractionalMaxPool3d: (2, 2), IMAGES["3d"]
AdaptiveLogSoftmaxWithLoss: (6, 7, [3]), FLAT, (7, B)
NLLLoss: (), FLAT, (6, B)
CrossEntropyLoss: (), FLAT, (6, B)
MultiMarginLoss: (), FLAT, (6, B)
MultiLabelMarginLoss: (), FLAT, (6, B, 6)
GaussianNLLLoss: (), FLAT, FLAT, "positive"
CosineEmbeddingLoss: (), FLAT, FLAT, (1, B)
MarginRankingLoss: (), FLAT, FLAT, FLAT
TripletMarginLoss: (), FLAT, FLAT, FLAT
TripletMarginWithDistanceLoss: (), FLAT, FLAT, FLAT
BCELoss: (), "positive", "positive"
KLDivLoss: (), "positive", "positive"
LinearCrossEntropyLoss: (6, 7), FLAT, (7, B)
RNNBase RNNCellBase NLLLoss2d CTCLoss MaxUnpool1d MaxUnpool2d MaxUnpool3d: None
"""
ROWS_OF_TABLE = (line.split(": ") for line in TABLE.strip().split("\n"))
CASES = {name: eval(given) for names, given in ROWS_OF_TABLE for name in names.split()}
REFUSED = {  # of the modules in training: what the error says
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"), "from this rank's rows alone"),
    **dict.fromkeys(("Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"), "draws random"),
    **dict.fromkeys(("Dropout", "RReLU", "FractionalMaxPool2d", "FractionalMaxPool3d"), "draws random numbers"),
}


def operand(what) -> torch.Tensor:
    if what == "positive":
        return torch.rand(FLAT, dtype=torch.float64) * 0.9 + 0.05
    if isinstance(what, int):
        return torch.randint(what, (B, 3))
    if what[0] != B:  # indices below the first number
        return torch.randint(what[0], what[1:])
    return torch.randn(what, dtype=torch.float64)


def modules():
    """(name, module, operands) of each class of torch.nn."""
    for name in sorted({*nn.modules.__all__} - {*NOT_CALLED}):
        family = next((given for start, given in OF_IMAGES.items() if name.startswith(start)), None)
        dims = name[-2:] if name[-2:] in IMAGES else None
        case = CASES.get(name, ((), FLAT, FLAT) if name.endswith("Loss") else ((), FLAT))
        if name not in CASES and family is not None and dims is not None:
            case = (family, IMAGES[dims])
        if name.startswith("Lazy") or case is None or not issubclass(getattr(nn, name), nn.Module):
            continue
        given, *operands = case
        options = {"reduction": "sum"} if "Loss" in name and name != "AdaptiveLogSoftmaxWithLoss" else {}
        yield name, getattr(nn, name)(*given, **options).double(), [operand(each) for each in operands]


def first(result) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else first(result[0])


def test_the_table_has_every_module_of_torch_nn():
    found = [name for name, _, _ in modules()]
    assert len(found) > 120
    assert REFUSED.keys() <= {*found}


@TWO
def test_each_is_equal_to_one_device_or_refused(mesh):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        for name, module, operands in modules():
            compare(name, module, operands, mesh)
    finally:
        torch.set_default_dtype(torch.float32)


def compare(name: str, module: nn.Module, operands: list, mesh) -> None:
    """Compare results and gradients of the sum of their squares with one device's."""
    params, types = parameters(module), {key: tree_type(W) for key, W in module.named_parameters()}
    own, g = [x.chunk(2)[mesh.rank] for x in operands], lambda *given: call(module, types, types, mesh)(*given)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            g(params, *own)
        return
    wanted, got = first(functional_call(module, params, tuple(operands))), first(g(params, *own))
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")
    close(tree.unshard(got, spec_of(got), mesh), wanted)
    if params and got.dim():
        one = grad(lambda p: first(functional_call(module, p, tuple(operands))).square().sum())(params)
        two = grad(lambda p: first(g(p, *own)).square().sum())(params)
        close(reduce_grads(two, types, mesh, "X", loss="sum"), one)


def tree_type(W: torch.Tensor) -> str:
    return f"W[{', '.join('IJKLMN'[: W.dim()])}]"


def spec_of(x: torch.Tensor) -> str:
    """The type of a result: a loss is a sum over the rows of all ranks."""
    return f"Out[{', '.join(['B_X', *'IJKLMN'[: x.dim() - 1]])}]" if x.dim() else "Out[] {U_X}"


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * self.draw()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps = self.steps + 1
        return x


def once(module, *operands):
    types = {name: tree_type(W) for name, W in module.named_parameters()}
    return call(module, types, types, AbstractMesh({"X": 2}))(parameters(module), *operands)


IDS, ROWS = torch.tensor([[1, 2]]), torch.randn(2, 6)
DROPS, X2 = nn.Sequential(nn.Dropout()), AbstractMesh({"X": 2})
WORDS = named("""
call                                                 words of its error
once(nn.Embedding(7, 6, max_norm=0.1), IDS)          the module: Embedding writes to weight (aten::embedding_renorm_)
once(nn.EmbeddingBag(7, 6, max_norm=0.1), IDS)       writes to weight (aten::embedding_renorm_), which
once(nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True)), torch.randn(2, 3, 4))
    0: InstanceNorm1d writes to 0.running_mean
once(nn.utils.spectral_norm(nn.Linear(6, 6)), ROWS)  writes to weight_v
once(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), ROWS)  writes to parametrizations.weight.0._
once(Counts(), ROWS)                                 the module replaces steps
once(nn.LSTM(6, 5, 2, dropout=0.5), ROWS)            LSTM draws random numbers
once(Draws(lambda: torch.rand(6)), ROWS)             Draws draws random numbers (aten::rand)
once(Draws(random.random), ROWS)                     the module draws random numbers of Python's or numpy's
once(nn.Sequential(nn.Dropout()), ROWS)              0: Dropout draws random numbers, which every rank would draw alike
call(lambda p, x: nn.functional.dropout(x), {}, {}, X2)({}, ROWS)  the function draws random numbers
call(DROPS, {}, {}, X2, dropped={'0': 'x[B_X, D]'})({}, ROWS)  0: Dropout is given no seed
call(DROPS, {}, {}, X2, dropped={'0': 'x[B_X]'})({}, ROWS, seed=1)  its type has 1 dims
""")
test_what_draws_or_writes_is_refused_by_name = refused(evaluated(WORDS, globals()))


def test_what_is_refused_has_not_been_written_to():
    module = nn.Embedding(7, 6, max_norm=0.1)
    params = parameters(module)
    before = params["weight"].clone()
    g = call(module, {"weight": "W[V, D]"}, {"weight": "W[V, D]"}, AbstractMesh({"X": 2}))
    with pytest.raises(ValueError, match="writes to weight"):
        grad(lambda p: g(p, IDS).sum())(params)
    assert torch.equal(params["weight"], before)


def test_a_module_that_is_set_to_training_later_is_refused_then():
    module = nn.Sequential(nn.RReLU()).eval()
    g = call(module, {}, {}, AbstractMesh({"X": 2}))
    g({}, ROWS)
    module.train()
    with pytest.raises(ValueError, match="0: RReLU draws random numbers"):
        g({}, ROWS)


@FOUR
def test_masks_of_dropout_are_those_of_one_device(mesh):
    """Other ones on other rows and at each use, the same ones on replicas, parts of one where channels are split."""
    drop = nn.Dropout(0.4)
    twice = nn.Sequential(drop, drop)
    x = torch.arange(1.0, 4 * 4 * 8 + 1).view(4, 4, 8)
    wanted = x
    for use in range(2):
        rate = {"rate": 0.4, "seed": 7, "samples": torch.arange(4), "positions": torch.arange(4)}
        wanted = dropout(wanted, "0", use, **rate)
    for type in ("x[B_X, T, D]", "x[B_X, T, D_Y]", "x[B, T_YX, D]", "x[B, T, D]", "x[B_XY, T, D]", "x[B, T_X, D_Y]"):
        g = call(twice, {}, {}, mesh, dropped={"0": type})
        own = tree.shard(x, type, mesh)
        assert torch.equal(tree.unshard(g({}, own, seed=7), type, mesh), wanted), type
        assert torch.equal(g({}, own, seed=7), g({}, own, seed=7))
        assert not torch.equal(g({}, own, seed=8), g({}, own, seed=7))
        (back,) = torch.func.vjp(lambda x, g=g: g({}, x, seed=7), own)[1](torch.ones_like(own))
        assert torch.equal(back != 0, g({}, own, seed=7) != 0)
    assert "forward" not in drop.__dict__
    again = call(twice, {}, {}, mesh, again=True, dropped={"0": "x[B_X, T, D]"})
    own = tree.shard(x, "x[B_X, T, D]", mesh)
    back = grad(lambda x: again({}, x, seed=7).sum())(own)
    assert torch.equal(back != 0, tree.shard(wanted, "x[B_X, T, D]", mesh) != 0)


@FOUR
def test_bf16_gradients_are_summed_in_float32_and_rounded_once(mesh):
    """Against a sum in float64 of the same terms, by an AllReduce and by FSDP's ReduceScatter on the way back."""
    torch.manual_seed(0)
    terms = torch.randn(4, 64, 8).to(torch.bfloat16)
    mine, wanted = terms[mesh.rank], terms.double().sum(0)
    stored, used = {"W": "W[F_XY, D]"}, {"W": "W[F, D]"}
    shard = {"W": tree.shard(torch.zeros(64, 8, dtype=torch.bfloat16), stored["W"], mesh)}
    off = {}
    for dtype in (None, torch.float32):
        whole = reduce_grads({"W": mine}, used, mesh, "XY", loss="sum", reduce_dtype=dtype)["W"]
        mean = reduce_grads({"W": mine}, used, mesh, "XY", loss="mean", reduce_dtype=dtype)["W"]
        g = call(lambda p, mine: (p["W"] * mine).sum(), stored, used, mesh, reduce_dtype=dtype)
        with trace() as log:
            scattered = grad(g)(shard, mine)["W"]
        (sent,) = (event for event in log.events if event.op == "ReduceScatter")
        assert sent.dtype == (dtype or torch.bfloat16)
        assert [event.dtype for event in log.events if event.op == "AllGather"] == [torch.bfloat16]
        found = whole, mean * 4, tree.unshard(scattered, stored["W"], mesh)
        assert {x.dtype for x in found} == {torch.bfloat16}
        off[dtype] = [((x.double() - wanted).abs() / wanted.abs()).max().item() for x in found]
    assert all(x <= 2**-8 for x in off[torch.float32]), off  # half of bf16's last place
    assert any(x > 2**-8 for x in off[None]), off
