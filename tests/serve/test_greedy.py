"""Greedy completions of 200 random prompts equal Hugging Face's (`tests/oracles/hugging_face_generate.py`), and the
engine's tokens and prefix hits those of vLLM's CPU build (`vllm_generate.py` beside it)."""

import greedy_table
import pytest
import vllm_table

from scaling import serve
from scaling.serve import engine
from scaling.serve.requests import Request
from scaling.serve.states import Options


@pytest.mark.slow
@pytest.mark.parametrize("name", greedy_table.CONFIGS)
def test_generate_is_hugging_faces(name):
    """Ragged batches in a contiguous cache, in pages with proposals of n-grams and of a draft, and by the engine."""
    config, params, prompts = greedy_table.CONFIGS[name], greedy_table.params_of(name), greedy_table.prompts_of(name)
    wanted, new = greedy_table.stored()[name], greedy_table.NEW
    small = greedy_table.CONFIGS["mqa"], greedy_table.params_of("mqa")
    for options in ({}, {"draft": "ngram", "page": 5}, {"draft": small, "page": 16}):
        assert serve.generate(params, prompts, config, new, **options) == wanted
    arrivals = [(0.0, Request(i, tuple(prompt), new)) for i, prompt in enumerate(prompts)]
    served = engine.serve(params, config, arrivals, Options(pages=60, page=5, slots=20, budget=48))
    assert [list(served.requests[i].tokens) for i in range(len(prompts))] == wanted


@pytest.mark.parametrize("name", vllm_table.CONFIGS)
def test_the_engines_tokens_and_hits_are_vllms(name):
    """All prompts, and when they are done, all of them again: how much of each is found."""
    prompts, wanted = vllm_table.prompts_of(name), vllm_table.stored()[name]
    rounds = [(1e6 * (i >= len(prompts)), p) for i, p in enumerate(2 * prompts)]
    arrivals = [(when, Request(i, tuple(p), vllm_table.NEW)) for i, (when, p) in enumerate(rounds)]
    options = Options(pages=60, page=vllm_table.PAGE, slots=12, budget=256)
    served = engine.serve(vllm_table.params_of(name), vllm_table.CONFIGS[name], arrivals, options)
    both = [served.requests[i] for i in range(len(arrivals))]
    assert [list(times.tokens) for times in both] == 2 * wanted["tokens"]
    assert [times.cached for times in both[len(prompts) :]] == wanted["cached"]


def test_they_are_many_and_differ():
    table = greedy_table.stored()
    assert sum(len(rows) for rows in table.values()) == 200
    assert len({tuple(row) for rows in table.values() for row in rows}) > 150
