"""A layer of experts on one device, token by token in plain Python; its sizes in Config."""

import math
from functools import partial

import pytest
import torch
from probes import layer_of_experts
from refused import refused
from torch.func import vjp

from scaling import tree
from scaling.configs import Config
from scaling.models import moe

SIZES = {"L": 1, "D": 6, "F": 10, "N": 2, "K": 1, "H": 4, "V": 7}
MIXTRAL = Config("mixtral", **SIZES, E=5, k=2)
DEEPSEEK = Config(
    "deepseek", **SIZES, E=8, k=3, shared=1, routing="sigmoid", expert_groups=4, top_groups=2, routed_scale=2.5
)


WRONG = {
    "unknown routing 'hash': softmax or sigmoid": {"routing": "hash"},
    "expert_groups=3 must divide E=8": {"expert_groups": 3},
    "top_groups=5 lie in 1..4": {"expert_groups": 4, "top_groups": 5},
    "k=2 experts cannot come from 1 groups": {"expert_groups": 8, "top_groups": 1},
    "capacity must be a factor above 0": {"capacity": 0.0},
    "aux_coef must be at least 0": {"aux_coef": -1.0},
    "z_coef must be at least 0": {"z_coef": float("nan")},
    "routed_scale must be above 0": {"routed_scale": 0.0},
    "unknown balance_by 'token'": {"balance_by": "token"},
}
test_config = refused({says: (partial(Config, "m", **SIZES, E=8, k=2, **given), says) for says, given in WRONG.items()})
X = layer_of_experts(DEEPSEEK, 3, 7)[1]
test_mask = refused(
    {
        f"{form.__name__} {name}": (
            lambda form=form, mask=mask: form(layer_of_experts(DEEPSEEK)[0], X, DEEPSEEK, mask=mask),
            "mask must be bool[B, T], ",
        )
        for form in (moe.dense, moe.forward)
        for name, mask in {"of a row": torch.ones(1, 7).bool(), "of floats": torch.ones(3, 7)}.items()
    }
)


def by_hand(params, x, config):
    """Of each token its experts and their weights, by Python's sorts and floats."""
    for token in x.flatten(0, 1):
        logits = (token @ params["router"]).tolist()
        score = [math.exp(s) / sum(map(math.exp, logits)) for s in logits]
        mine = sorted(range(config.E), key=lambda e, score=score: (-score[e], e))[: config.k]
        total = sum(score[e] for e in mine)
        yield token, [(e, score[e] / total) for e in mine]


def test_dense_token_by_token():
    config = MIXTRAL.with_(capacity=0.5)
    params, x, _ = layer_of_experts(config, 3, 7)
    y, aux = moe.dense(params, x, config)
    most, taken, want = math.ceil(0.5 * 21 * 2 / 5), [0] * 5, torch.zeros(21, 6, dtype=torch.float64)
    for n, (token, chosen) in enumerate(by_hand(params, x, config)):
        for e, weight in chosen:
            taken[e] += 1
            if taken[e] <= most:
                hidden = torch.nn.functional.silu(token @ params["W_gate"][e]) * (token @ params["W_in"][e])
                want[n] += weight * (hidden @ params["W_out"][e])
    torch.testing.assert_close(y.flatten(0, 1), want, rtol=1e-12, atol=1e-12)
    assert aux["load"].tolist() == taken
    assert aux["load"].dtype == torch.int64


def test_ties_go_to_the_lower_expert():
    config, rng = MIXTRAL.with_(E=64, k=3, D=33), torch.Generator().manual_seed(1)
    column, x = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((33, 4), (50, 33)))
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


def test_a_bias_goes_up_where_fewer_than_the_mean_came():
    assert moe.update_bias(torch.zeros(3), torch.tensor([1, 2, 3]), 0.5).tolist() == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("form", [moe.dense, moe.forward])
@pytest.mark.parametrize(("config", "first"), [(DEEPSEEK, False), (DEEPSEEK, True), (MIXTRAL, False)], ids=str)
def test_what_the_load_is_to_be_even_over(form, config, first):
    """Over the batch or each sequence, all choices or the first (Switch), padding left out."""
    params, x, _ = layer_of_experts(config)
    config = config.with_(balance_first=first)
    mask = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(0)) < 0.6
    mask[0] = False
    logits, E = x @ params["router"], config.E
    score = logits.sigmoid() if config.routing == "sigmoid" else logits.softmax(-1)
    score = score / score.sum(-1, keepdim=True)
    chosen = moe.choose_experts(x, params["router"], config, params.get("bias"))

    choices = chosen[..., :1] if first else chosen
    took = torch.nn.functional.one_hot(choices, E).double().mean(-2)  # [B, T, E]

    def even(took, score):
        return E * (took.mean(0) * score.mean(0)).sum().item() if len(took) else 0.0

    each = [even(took[b][seen], score[b][seen]) for b, seen in enumerate(mask)]
    wanted = {"batch": even(took[mask], score[mask]), "sequence": sum(each) / len(x)}
    for by, value in wanted.items():
        _, aux = form(params, x, config.with_(balance_by=by), mask=mask)
        assert aux["balance"].item() == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(aux["z"], logits.logsumexp(-1).square()[mask].mean())


def outputs(y, aux):
    return (y, aux["balance"], aux["z"]), aux["load"]


@pytest.mark.parametrize(
    "config", [MIXTRAL.with_(capacity=0.7), DEEPSEEK, MIXTRAL.with_(E=40, k=1, gated=False)], ids=lambda c: c.name
)
def test_forward_equals_dense(config):
    """Each token by its own experts alone, sorted, with full and with empty experts: outputs, losses, gradients."""
    params, x, dy = layer_of_experts(config)
    outs, grads = [], []
    for f in (moe.forward, moe.dense):
        (y, balance, z), pull, load = vjp(lambda p, x, f=f: outputs(*f(p, x, config)), params, x, has_aux=True)
        outs.append([y, balance, z, load])
        grads.append(pull((dy, torch.tensor(0.3).double(), torch.tensor(0.7).double())))
    assert 0 in load.tolist() or config.E < 40
    assert not any(grads[0][0].get("bias", ()))  # it enters the choice, and not the weights
    pairs = [*zip(*outs, strict=True), *zip(*map(tree.leaves, grads), strict=True)]
    for got, want in pairs:
        assert (got - want).abs().max() <= 1e-12 * want.abs().max().clamp(min=1e-9)
