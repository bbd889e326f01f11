"""A layer of experts on one device, token by token in plain Python; its sizes in Config."""

import itertools
import math
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from probes import shaken
from problems import drawn
from refused import named, refused
from torch.func import vjp

from scaling import tree
from scaling.configs import Config
from scaling.configs.hugging_face import BALANCED, read_config, router_weight
from scaling.configs.model_types import KINDS
from scaling.models import hf, moe, transformer

SIZES: dict[str, Any] = {"L": 1, "D": 6, "F": 10, "N": 2, "K": 1, "H": 4, "V": 7}
MIXTRAL = Config("mixtral", **SIZES, E=5, k=2)
DEEPSEEK = MIXTRAL.with_(E=8, k=3, shared=1, routing="sigmoid", expert_groups=4, top_groups=2, routed_scale=2.5)


def layer_of(config):
    """The params of a layer, x[B, T, D], and the cotangent of y."""
    (layer,) = tree.unstacked(shaken(config)["layers"])
    ((x, dy),) = drawn((2, 2, 9, config.D), seed=5)
    return layer, x, dy


WRONG = named(
    """
words of the error                                      options
routing is 'hash': must be one of 'softmax', 'sigmoid'  {"routing": "hash"}
expert_groups=3 must divide E=8                         {"expert_groups": 3}
top_groups=5 lie in 1..4                                {"expert_groups": 4, "top_groups": 5}
k=2 experts cannot come from 1 groups                   {"expert_groups": 8, "top_groups": 1}
capacity is 0.0: must be in (0, inf)                    {"capacity": 0.0}
aux_coef is -1.0: must be in [0, inf)                   {"aux_coef": -1.0}
z_coef is nan: must be in [0, inf)                      {"z_coef": float("nan")}
routed_scale is 0.0: must be in (0, inf)                {"routed_scale": 0.0}
balance_by is 'token': must be one of                   {"balance_by": "token"}
""",
    globals(),
)
test_config = refused(
    {words: (partial(Config, "m", **SIZES, E=8, k=2, **given), words) for words, given in WRONG.items()}
)


def mlp(W, x):
    hidden = x @ W["W_in"]
    return (F.silu(x @ W["W_gate"]) * hidden if "W_gate" in W else F.gelu(hidden)) @ W["W_out"]


def by_hand(params, x, config):
    """(y, balance, z, load): each token by itself, its experts by Python's sorts."""
    logits, most = x @ params["router"], math.inf
    score = logits.sigmoid() if config.routing == "sigmoid" else logits.softmax(-1)
    if config.capacity is not None:
        most = math.ceil(config.capacity * len(x) * x.shape[1] * config.k / config.E)
    size, rows, load = config.E // config.expert_groups, [], [0] * config.E
    took = torch.zeros(*x.shape[:2], config.E, dtype=x.dtype)
    for token in itertools.product(*map(range, x.shape[:2])):
        choice = (score[token] + params.get("bias", 0)).tolist()
        groups = [range(g, g + size) for g in range(0, config.E, size)]
        groups.sort(key=lambda group, choice=choice: -sum(sorted(choice[e] for e in group)[-2:]))
        candidates = itertools.chain(*groups[: config.top_groups])
        mine = sorted(candidates, key=lambda e, choice=choice: -choice[e])[: config.k]
        y = mlp(params["shared"], x[token]) if config.shared else torch.zeros_like(x[token])
        for e in mine:
            load[e] += 1
            if load[e] <= most:
                W = {name: params[name][e] for name in ("W_in", "W_gate", "W_out") if name in params}
                y = y + score[token][e] / score[token][mine].sum() * config.routed_scale * mlp(W, x[token])
        rows.append(y)
        counted = mine[:1] if config.balance_first else mine
        took[token][counted] = 1 / len(counted)

    even = score / score.sum(-1, keepdim=True)
    parts = len(x) if config.balance_by == "sequence" else 1
    some = zip(took.flatten(0, 1).chunk(parts), even.flatten(0, 1).chunk(parts), strict=True)
    balance = sum((f.mean(0) * p.mean(0)).sum() for f, p in some) * config.E / parts
    return torch.stack(rows).view_as(x), balance, logits.logsumexp(-1).square().mean(), torch.tensor(load)


LAYERS = named(
    """
name           config
capacity       MIXTRAL.with_(capacity=0.7, balance_by="sequence")
groups         DEEPSEEK
first choices  DEEPSEEK.with_(balance_by="sequence", balance_first=True)
empty experts  MIXTRAL.with_(E=40, k=1, gated=False, balance_first=True)
""",
    globals(),
)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", [moe.dense, moe.forward])
def test_a_layer_token_by_token_and_its_derivatives(form, name):
    """Outputs, losses that are even over the batch or each sequence, the load, and gradients."""
    config = LAYERS[name]
    params, x, dy = layer_of(config)

    def formed(params, x):
        y, aux = form(params, x, config)
        return (y, aux["balance"], aux["z"]), aux["load"]

    def written_out(params, x):
        *outs, load = by_hand(params, x, config)
        return tuple(outs), load

    found = []
    for f in (formed, written_out):
        outs, pull, load = cast(tuple, vjp(f, params, x, has_aux=True))
        grads = pull((dy, torch.tensor(0.3).double(), torch.tensor(0.7).double()))
        found.append([*outs, load, *tree.leaves(grads)])
    assert 0 in load.tolist() or config.E < 40
    assert not any(grads[0].get("bias", ()))  # it enters the choice, and not the weights
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= 1e-12 * want.abs().max().clamp(min=1e-9)


def test_ties_go_to_the_lower_expert_and_a_bias_to_those_that_few_choose():
    config, (column, x) = MIXTRAL.with_(E=64, k=3, D=33), drawn((33, 4), (50, 33), seed=1)
    router = column.repeat(1, 16)  # expert e is the twin of e + 4, e + 8, ...
    choose = partial(moe.choose_experts, config=config)
    first = (x @ column).argmax(-1)
    wanted = torch.stack([first, first + 4, first + 8], -1)
    for experts in (choose(x, router), choose(x.float(), router.float())):
        assert torch.equal(experts, wanted)
    turned = torch.stack([column[:, 0].roll(e) for e in range(64)], 1)  # sums of the same numbers, in another order
    same = torch.arange(1, 6, dtype=torch.float64)[:, None].expand(5, 33)
    assert len((same @ turned).unique()) > 5
    assert choose(same, turned).tolist() == [[0, 1, 2]] * 5
    bias = torch.zeros(64, dtype=torch.float64).index_fill(0, torch.tensor([7, 9]), 1e-3)
    assert choose(torch.zeros(1, 33), router, bias=bias).tolist() == [[7, 9, 0]]
    # a bias goes up where fewer than the mean came
    assert moe.update_bias(torch.zeros(3), torch.tensor([1, 2, 3]), 0.5).tolist() == [0.5, 0.0, -0.5]


COUNTS = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "head_dim": 8, "sliding_window": 4}
COUNTS |= {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [0]}


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("name", [name for name in BALANCED if name != "qwen3_next"])  # which has no single layer
def test_of_one_layer_the_loss_of_the_routers_is_transformers_and_of_several_it_is_left_out(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with it: pip install transformers")
    model = getattr(transformers, KINDS[name].architecture)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
    asked = {"num_key_value_heads": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    known = {key: value for key, value in COUNTS.items() if key in KINDS[name].keys}
    L = 1 + ("mlp_only_layers" in known)
    config = model.config_class(**sizes, **asked, **known, num_hidden_layers=L)
    config._experts_implementation = config._attn_implementation = "eager"
    theirs = model(config).double()
    names = ("mlp.gate.weight", "router.weight", "_moe.gate.weight", "router.layer.weight")
    (router,) = [param for where, param in theirs.named_parameters() if where.endswith(names)]
    with torch.no_grad():
        router.mul_(20)
    theirs.save_pretrained(tmp_path)
    ours, params = hf.load(tmp_path, torch.float64)
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    found = theirs(tokens, labels=tokens)
    mine = params["layers"]["router"].requires_grad_()
    losses = [transformer.loss(params, tokens, config=c, targets=tokens) for c in (ours, ours.with_(aux_coef=0.0))]
    added = losses[0] - losses[1]
    torch.testing.assert_close(added, 0.3 * found.aux_loss, rtol=1e-6, atol=0, check_dtype=False)
    (wanted,) = torch.autograd.grad(0.3 * found.aux_loss, router)
    (got,) = torch.autograd.grad(added, mine)
    torch.testing.assert_close(got[0].T, wanted, rtol=1e-5, atol=1e-6)
    table = config.to_dict() | {"num_hidden_layers": L + 1, "layer_types": None}
    assert (router_weight(table), Config("m", **read_config(table)).aux_coef) == (0.3, 0)
    assert router_weight(table | {"output_router_logits": False}) == 0


def test_the_classes_that_balance_and_their_coefficients_are_transformers():
    transformers = pytest.importorskip("transformers", reason="compares with it: pip install transformers")
    configs = {
        name: getattr(transformers, kind.architecture).config_class()
        for name, kind in KINDS.items()
        if kind.architecture
    }
    found = {
        name: config.router_aux_loss_coef for name, config in configs.items() if hasattr(config, "router_aux_loss_coef")
    }
    assert found.pop("llama4_text")  # which its class ignores
    assert found == BALANCED
