"""What a model's files say of its use: how long a text it is made for, how tokens are drawn, and what ends a text."""

import itertools
import json
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from refused import read_table
from starlette.testclient import TestClient

from scaling.configs import Config, load
from scaling.configs.hugging_face_write import write_config
from scaling.models import hf, transformer
from scaling.models.template import ends_of
from scaling.models.text import ByteText, tokenizer_of
from scaling.serve import command as serve
from scaling.serve import generate_command as command
from scaling.serve.generation import generate
from scaling.serve.loading import defaults_of
from scaling.serve.requests import Sampling, longest_text, read_requests
from scaling.serve.states import Options
from scaling.serve.web.app import application
from scaling.serve.web.desk import Desk
from scaling.serve.web.words import Model, read_body

SMALL = Config("small", L=1, D=8, F=12, N=2, K=1, H=4, V=256, max_positions=8)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# by the models' cards: Llama 3.1, Qwen2.5, DeepSeek-V3, Vicuna 1.5 of 16k
TABLE = """
max_position_embeddings  rope_scaling                                                                           tokens
131072                   LLAMA3                                                                                 131072
32768                    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}        131072
163840                   {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}               163840
4096                     {"type": "linear", "factor": 4.0}                                                      16384
2048                     None                                                                                   2048
None                     None                                                                                   None
"""
LONGEST = read_table(TABLE, globals())
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
WORDS = {"version": "1.0", "added_tokens": []}
WORDS["model"] = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 3}, "unk_token": "a"}
OWN, UNKNOWN = (CLASS | {"eos_token": text} for text in ("</s>", "<unknown>"))
TABLE = """
ids     files
(3,)    tokenizer_config=OWN
(3,)    tokenizer_config=CLASS | {"eos_token": {"__type": "AddedToken", "content": "</s>"}}, config={}
(3,)    special_tokens_map={"eos_token": "</s>"}, generation_config={"eos_token_id": None}
(7,)    tokenizer_config=OWN, config={"eos_token_id": 7}
(1, 2)  tokenizer_config=OWN, generation_config={"eos_token_id": [1, 2]}
()      tokenizer_config=OWN, generation_config={"eos_token_id": []}
()      tokenizer_config=CLASS | {"eos_token": None}
()      tokenizer_config=UNKNOWN
()
(2,)    config={"eos_token_id": 2}
(2, 5)  config={"eos_token_id": 2}, generation_config={"eos_token_id": [2, 5]}
"""
ENDS = read_table(TABLE.replace("files", "options"), globals())


@pytest.mark.parametrize(("ends", "files"), ENDS)
def test_the_tokenizers_end_counts_where_nothing_else_says_one(files, ends, tmp_path):
    pytest.importorskip("tokenizers")
    for name, table in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    (tmp_path / "tokenizer.json").write_text(json.dumps(WORDS))
    assert ends_of(tmp_path, tokenizer_of(tmp_path, 8)) == ends


ASKED = [  # (generation_config.json, how tokens are drawn, what is said of it)
    ({"do_sample": True, "temperature": 2, "top_p": 1}, Sampling(2, None, 1.0), "sampling by temperature 2, top_p 1"),
    ({"do_sample": True}, Sampling(1.0), "sampling by temperature 1"),
    ({"do_sample": True, "top_k": 0, "min_p": 0}, Sampling(1.0, None, None, 0.0), "sampling by temperature 1, min_p 0"),
    (
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "num_beams": 1},
        Sampling(0.7, 20, None, 0.1),
        "sampling by temperature 0.7, top_k 20, min_p 0.1; not computed here: repetition_penalty 1.05",
    ),
    ({"do_sample": False, "temperature": 0.6}, Sampling(), ""), ({"temperature": 0.6, "top_k": 20}, Sampling(), ""),
    ({"no_repeat_ngram_size": 3, "suppress_tokens": None}, Sampling(), "not computed here: no_repeat_ngram_size 3"),
    ({"eos_token_id": 2, "repetition_penalty": 1.0}, Sampling(), ""), (None, Sampling(), ""),
]  # fmt: skip


@pytest.mark.parametrize(("table", "how", "said"), ASKED)
def test_tokens_are_drawn_as_the_model_asks_where_no_option_says_otherwise(table, how, said, tmp_path):
    if table is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(table))
    found = defaults_of(tmp_path)
    assert str(found) == (said and f"generation_config.json: {said}")

    def drawn(*options: str) -> Sampling:
        words = ["--model", "m", "--prompt", "a", *options]
        return command.sampling_of(command.arguments(words), SimpleNamespace(defaults=found))

    assert drawn() == how
    assert drawn("--temperature", "0") == replace(how, temperature=0)
    assert drawn("--top-k", "5", "--min-p", "0.5") == replace(how, top_k=5, min_p=0.5)


def test_a_request_is_drawn_as_the_model_asks_where_it_does_not_say():
    own = Sampling(0.6, 20, 0.9)
    model = Model("m", ByteText(), 256, (), None, Options(8, 16, 1), sampling=own)

    def drawn(**fields) -> Sampling:
        body = json.dumps({"prompt": "a"} | fields)
        over_http = read_body(body.encode(), model, False, itertools.count()).requests[0].draw.how
        (line,), _ = read_requests(body.encode(), ByteText(), 256, (), 5, own)
        assert line.request.draw.how == over_http
        return over_http

    assert drawn() == drawn(temperature=None, top_p=None) == own
    assert drawn(temperature=0, min_p=0.1) == replace(own, temperature=0, min_p=0.1)
    assert drawn(top_k=-1, top_p=1) == Sampling(0.6, None, 1.0)


@pytest.mark.filterwarnings("ignore:small is made for texts")
def test_a_file_of_requests_is_served_as_the_model_asks(tmp_path, capsys):
    params = transformer.init(SMALL, 1, torch.float32)
    hf.save(tmp_path / "small", SMALL, params)
    (tmp_path / "small" / "generation_config.json").write_text('{"do_sample": true, "top_k": 40, "num_beams": 2}')
    (tmp_path / "in").write_text('{"prompt": "ab", "seed": 3}')
    words = f"--model {tmp_path}/small --input {tmp_path}/in --output {tmp_path}/out --max-new-tokens 8".split()
    for options, sampling in (([], {"temperature": 1.0, "top_k": 40}), (["--no-generation-config"], {})):
        assert serve.main([*words, *options]) == 0
        wanted = generate(params, [list(b"ab")], SMALL, 8, seed=3, **sampling)[0]
        assert json.loads((tmp_path / "out").read_text())["ids"] == wanted
        note = "generation_config.json: sampling by temperature 1, top_k 40; not computed here: num_beams 2\n"
        assert capsys.readouterr().err == (note if sampling else "")


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_k": -2}])
def test_a_file_with_which_no_token_can_be_drawn_is_refused(wrong, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True} | wrong))
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"generation_config\.json: {name}.*\n  fix: .*--no-generation-config"):
        defaults_of(tmp_path)


@pytest.mark.parametrize(("positions", "scaling", "longest"), LONGEST)
def test_the_longest_text_is_read_and_kept(positions, scaling, longest, tmp_path):
    table = write_config(SMALL.with_(max_positions=0))
    table |= {"max_position_embeddings": positions} if positions else {}
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
