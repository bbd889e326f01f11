"""generate against the model run without a cache: token by token, for every way to get them."""

import pytest
import torch

from scaling import serve, tree
from scaling.configs import Config
from scaling.models import transformer
from scaling.serve.requests import Sampling, request_seeds
from scaling.serve.sampling import probabilities, uniforms

CONFIG = Config("tiny", L=2, D=16, F=24, N=4, K=2, H=4, V=32)
SMALL = Config("small", L=1, D=8, F=8, N=4, K=1, H=4, V=32)
params = transformer.init(CONFIG, 1, torch.float64)
small = transformer.init(SMALL, 2, torch.float64)
PROMPTS = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3], [2]]


def uncached(prompt, count, how=None, seed=0):
    tokens = list(prompt)
    for _ in range(count):
        logits = transformer.forward(params, torch.tensor([tokens]), config=CONFIG)[:, -1]
        p = probabilities(logits, how or Sampling())[0]
        u = float(uniforms([seed], [len(tokens)]))
        tokens.append(int(p.argmax()) if how is None else int((p.cumsum(0) <= u).sum()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("options", [{}, {"page": 3}, {"draft": "ngram"}, {"draft": (SMALL, small), "page": 4}],
                         ids=["contiguous", "pages", "ngram", "draft"])  # fmt: skip
def test_greedy_is_the_model_without_a_cache(options):
    wanted = [uncached(prompt, 9) for prompt in PROMPTS]
    assert serve.generate(params, PROMPTS, CONFIG, 9, **options) == wanted


def test_sampled_is_the_model_without_a_cache():
    how = Sampling(1.5, top_k=20, top_p=0.95)
    seeds = request_seeds(PROMPTS, 7)
    wanted = [uncached(prompt, 8, how, seed) for prompt, seed in zip(PROMPTS, seeds, strict=True)]
    got = serve.generate(params, PROMPTS, CONFIG, 8, temperature=1.5, top_k=20, top_p=0.95, seed=7)
    assert got == wanted
    assert got[1] != got[3]  # the same prompt twice, drawn twice


@pytest.mark.parametrize("draft", [None, "ngram", (SMALL, small)], ids=["plain", "ngram", "draft"])
def test_a_request_gives_the_same_alone(draft):
    options = {"temperature": 1.2, "seed": 3, "draft": draft, "proposals": 3}
    together = serve.generate(params, PROMPTS, CONFIG, 7, **options)
    assert together[:3] == [serve.generate(params, [prompt], CONFIG, 7, **options)[0] for prompt in PROMPTS[:3]]


def test_a_draft_that_is_the_model_is_always_kept():
    """Each step gives k + 1 tokens; the number of steps is what the draft saves."""
    steps = list(serve.stream(params, PROMPTS[:2], CONFIG, 13, Sampling(0.8), draft=(CONFIG, params), proposals=3))
    assert [len(tokens) for tokens in steps] == [2, 8, 8, 8]


@pytest.mark.parametrize("proposals", [1, 2, 5])
@pytest.mark.parametrize("draft", ["ngram", (SMALL, small), (CONFIG, params)], ids=["ngram", "small", "same"])
def test_a_draft_changes_no_token_that_is_sampled(draft, proposals):
    options = {"temperature": 1.0, "top_k": 4, "seed": 9}
    plain = serve.generate(params, PROMPTS, CONFIG, 12, **options)
    assert serve.generate(params, PROMPTS, CONFIG, 12, **options, draft=draft, proposals=proposals) == plain


def test_sampled_with_a_draft_has_the_models_distribution():
    """The second token of 2,000 copies of a prompt, given the first: chi-square against the model's own."""
    n = 2000
    out = torch.tensor(serve.generate(params, [[5, 3]] * n, CONFIG, 2, temperature=1.0, top_k=4, draft=(SMALL, small)))
    first = int(out[:, 0].mode().values)
    drawn = out[out[:, 0] == first, 1]
    p = probabilities(
        transformer.forward(params, torch.tensor([[5, 3, first]]), config=CONFIG)[0, -1], Sampling(1.0, top_k=4)
    )
    counts = torch.bincount(drawn, minlength=32).double()
    assert counts[p == 0].sum() == 0
    some = p > 0
    statistic = ((counts[some] - len(drawn) * p[some]) ** 2 / (len(drawn) * p[some])).sum()
    assert len(drawn) > 400
    assert torch.special.gammaincc(torch.tensor(1.5, dtype=torch.float64), statistic / 2) > 1e-3


def test_stop_ids_end_a_completion_and_are_its_last():
    whole = serve.generate(params, PROMPTS, CONFIG, 9)
    end = whole[0][4]
    for draft in (None, "ngram"):
        got = serve.generate(params, PROMPTS, CONFIG, 9, stop=[end], draft=draft)
        assert got == [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert serve.generate(params, PROMPTS, CONFIG, 9, stop=end) == got


def test_logprobs_and_scores_are_the_models():
    tokens = [t for step in serve.stream(params, PROMPTS, CONFIG, 4, Sampling()) for t in step if t.row == 0]
    text = [*PROMPTS[0], *(t.id for t in tokens)]
    logits = transformer.forward(params, torch.tensor([text[:-1]]), config=CONFIG)[0].log_softmax(-1)
    wanted = logits.gather(-1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
    assert [t.logprob for t in tokens] == pytest.approx(wanted[-4:], abs=1e-12)
    assert serve.score(params, [text, [7, 7]], CONFIG)[0] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"), ({"prompts": [[32]]}, "prompt 0: token 32.*0..31"),
        ({"prompts": [[-1]]}, "token -1"), ({"max_new_tokens": -1}, "max_new_tokens"), ({"top_k": 0}, "top_k"),
        ({"draft": 3}, "draft=3"), ({"draft": "ngram", "proposals": 0}, "proposals"),
        ({"draft": (SMALL.with_(V=33), small)}, "same vocabulary"),
    ],
)  # fmt: skip
def test_bad_input(change, named):
    options = {"prompts": [[1]], "max_new_tokens": 2, "config": CONFIG} | change
    with pytest.raises(ValueError, match=f"(?s){named}"):
        serve.generate(params, **options)


def test_a_draft_in_either_order():
    one, other = (serve.generate(params, [[5, 3]], CONFIG, 6, draft=d) for d in ((SMALL, small), (small, SMALL)))
    assert one == other == serve.generate(params, [[5, 3]], CONFIG, 6)


def test_nothing_to_do():
    assert serve.generate(params, [], CONFIG, 3) == []
    assert serve.generate(params, [[1], [2]], CONFIG, 0) == [[], []]


def on_a_mesh(mesh):
    mine = tree.shard(params, serve.specs(CONFIG, mesh), mesh)
    split = tree.shard(params, serve.specs(CONFIG, mesh, form="sequence"), mesh)
    drafted = SMALL, tree.shard(small, serve.specs(SMALL, mesh, form="sequence"), mesh)
    options = {"temperature": 0.9, "seed": 2, "draft": drafted, "proposals": 2}
    sampled = serve.generate(split, PROMPTS[:3], CONFIG, 3, mesh=mesh, form="sequence", **options)
    return serve.generate(mine, PROMPTS[:3], CONFIG, 3, mesh=mesh), sampled


def test_on_a_mesh(ranks):
    """Heads over Y, a batch of three over Z = 2; with a draft, sampled, the caches' sequence over Z."""
    greedy = serve.generate(params, PROMPTS[:3], CONFIG, 3)
    options = {"temperature": 0.9, "seed": 2, "draft": (SMALL, small), "proposals": 2}
    sampled = serve.generate(params, PROMPTS[:3], CONFIG, 3, **options)
    assert ranks(on_a_mesh, {"Y": 2, "Z": 2}) == [(greedy, sampled)] * 4
