"""Greedy completions of 200 random prompts equal Hugging Face's (`tests/oracles/hugging_face_generate.py`)."""

import greedy_table
import pytest

from scaling import serve
from scaling.serve import engine
from scaling.serve.states import Options, Request


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


def test_they_are_many_and_differ():
    table = greedy_table.stored()
    assert sum(len(rows) for rows in table.values()) == 200
    assert len({tuple(row) for rows in table.values() for row in rows}) > 150
