"""How long a text the model is made for: read from its config.json, warned of, and said over HTTP."""

import itertools
import json
import warnings
from typing import cast

import pytest
import torch
from starlette.testclient import TestClient

from scaling.configs import Config, load
from scaling.configs.hugging_face import write_config
from scaling.models import transformer
from scaling.models.text import ByteText
from scaling.serve.generation import generate
from scaling.serve.requests import longest_text
from scaling.serve.states import Options
from scaling.serve.web.app import application
from scaling.serve.web.desk import Desk
from scaling.serve.web.words import Model, read_body

SMALL = Config("small", L=1, D=8, F=12, N=2, K=1, H=4, V=256, max_positions=8)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LONGEST = [  # by the models' cards: (max_position_embeddings, rope_scaling, tokens)
    (131072, LLAMA3, 131072),  # Llama 3.1
    (32768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen2.5
    (163840, {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840),  # DeepSeek-V3
    (4096, {"type": "linear", "factor": 4.0}, 16384),  # Vicuna 1.5 of 16k
    (2048, None, 2048), (None, None, None),
]  # fmt: skip


@pytest.mark.parametrize(("positions", "scaling", "longest"), LONGEST)
def test_the_longest_text_is_read_and_kept(positions, scaling, longest, tmp_path):
    table = write_config(SMALL.with_(max_positions=0)) | {"max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps(table | {"rope_scaling": scaling}))
    config = load(tmp_path / "config.json")
    assert longest_text(config) == longest
    assert write_config(config).get("max_position_embeddings") == positions


def test_a_text_beyond_it_is_warned_of():
    params = transformer.init(SMALL, 1, torch.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        generate(params, [[1, 2, 3], [4]], SMALL, 6)  # the last token is not computed
        assert not said
        assert [len(row) for row in generate(params, [[1, 2, 3], [4]], SMALL, 12)] == [12, 12]
    assert [str(each.message).partition(",")[0] for each in said] == ["small is made for texts of at most 8 tokens"]


def test_it_is_said_over_http_and_bounds_an_answer_that_is_not():
    """An answer of a chat that names no length ends with the model's, where the cache has room for more."""
    model = Model("small", ByteText(), 256, (), lambda messages: messages[0]["content"], Options(8, 16, 1), None, 8)
    call = json.dumps({"messages": [{"role": "user", "content": "abc"}]}).encode()
    assert read_body(call, model, True, itertools.count()).requests[0].max_new_tokens == 5
    client = TestClient(application(cast(Desk, None), model))
    assert client.get("/v1/models").json()["data"][0]["max_position_embeddings"] == 8
