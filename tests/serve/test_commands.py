"""`python -m scaling.generate` and `python -m scaling.serve`, in this process; text as it is streamed."""

import json
import random
import sys

import pytest

from scaling import __main__, serve
from scaling.configs import Config
from scaling.configs.sources import Source
from scaling.generate import command as generate
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer
from scaling.models.text import ByteText, Unknown, tokenizer_of
from scaling.serve import command as batch
from scaling.serve import loading
from scaling.serve.requests import Request, RequestLine
from scaling.serve.text import TextStream, chat_prompt, ends_of
from scaling.train import checkpoint

CONFIG = Config("tiny", L=1, D=16, F=24, N=4, K=2, H=4, V=256)
params = transformer.init(CONFIG, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf.save(path, CONFIG, params)
    return path


def test_a_character_is_never_split():
    text, stream = "aß€𝄞!", TextStream(ByteText())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert set("".join(pieces)) == {piece for piece in pieces if piece}
    half = TextStream(ByteText())
    assert [half.push(byte) for byte in "€".encode()[:2]] == ["", ""]
    assert half.rest() == "\ufffd"


class Pairs:
    """A tokenizer whose tokens are bytes, decoded only together, as Hugging Face's are."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def reader(self):
        return None


def test_a_tokenizer_that_looks_back():
    stream = TextStream(Pairs(), ["!?"])
    assert [stream.push(b) for b in "é!a!?b".encode()] == ["", "é", "", "!a", "", "", ""]
    assert stream.stopped
    assert stream.rest() == ""


def test_a_folders_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model.save(str(tmp_path / "tokenizer.json"))
    found = tokenizer_of(tmp_path, 3)
    assert found.encode("a b", special=True) == [0, 1, 2]
    assert found.encode("a b") == [1, 2]
    stream = TextStream(found, ["b"])
    assert [stream.push(1), stream.push(2), stream.rest()] == ["a", " ", ""]
    with pytest.raises(ValueError, match=r"has the ids 0\.\.2, but .* has 2"):
        tokenizer_of(tmp_path, 2)
    assert isinstance(tokenizer_of(tmp_path / "none", 256), ByteText)
    unknown = tokenizer_of(tmp_path / "none", 512)
    assert isinstance(unknown, Unknown)
    with pytest.raises(ValueError, match="fix: put the model's tokenizer"):
        unknown.encode("a")


@pytest.mark.parametrize("kind", ["Metaspace", "ByteLevel"])
def test_what_is_streamed_is_what_all_ids_are_together(kind):
    """Of tokenizers whose tokens have another text at the begin, or are parts of characters; with special ones."""
    tokenizers = pytest.importorskip("tokenizers")
    if kind == "Metaspace":
        words = ["<s>", "\u2581a", "\u2581b", "c", "\u2581", "d\u2581e", "\u00e9"]
    else:
        words = ["<s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "\u0120the", "\u00c3\u00a9"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>")
    loaded = tokenizers.Tokenizer(model)
    loaded.decoder = getattr(tokenizers.decoders, kind)()
    loaded.add_special_tokens(["<s>"])

    class Read(Pairs):
        def decode(self, ids):
            return loaded.decode(list(ids))

    chance = random.Random(0)
    for _ in range(60):
        text = "".join(chance.choice("aé€𝄞 \n") for _ in range(6)).encode()
        alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        ids = [chance.randrange(len(words)) for _ in range(chance.randrange(1, 20))]
        if kind == "ByteLevel":
            spelled = "".join(piece for piece, _ in alphabet.pre_tokenize_str(text.decode()))
            ids = [words.index(character) for character in spelled] + [0, *ids[:1], 0]
        stream = TextStream(Read())
        assert "".join([*map(stream.push, ids), stream.rest()]) == loaded.decode(ids)
        assert len(stream.ids) < 12


def test_a_folders_tokenizer_without_its_library(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"fix: pip install 'scaling-book-torch\[hf\]'"):
        tokenizer_of(tmp_path, 9)


def test_stop_strings_over_several_tokens():
    stream = TextStream(ByteText(), ["END", "xx"])
    assert "".join(stream.push(b) for b in b"aE xEN xENDb") == "aE xEN x"
    assert stream.stopped
    open_ended = TextStream(ByteText(), ["END"])
    assert "".join(open_ended.push(b) for b in b"abEN") == "ab"
    assert open_ended.rest() == "EN"


def test_generate_says_what_the_model_says(folder, capsys):
    prompt = list(b"ab")
    wanted = serve.generate(params, [prompt], CONFIG, 5)[0]
    options = ["--model", str(folder), "--max-new-tokens", "5"]
    assert generate.main([*options, "--prompt-ids", "97,98"]) == 0
    assert [int(id) for id in capsys.readouterr().out.split()] == wanted
    assert __main__.main(["generate", *options, "--prompt", "ab", "--logprobs", "--draft", "ngram"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(bytes(wanted).decode(errors="replace"))
    assert "over 5 tokens; perplexity" in out
    assert generate.main([*options, "--prompt", "abc", "--score"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [float(line.split()[0]) for line in lines[:2]] == pytest.approx(
        serve.score(params, [list(b"abc")], CONFIG)[0], abs=1e-4
    )


def test_generate_from_a_training_run(folder, tmp_path, capsys):
    """A checkpoint holds the optimizer's state as well, which is not read."""
    config = Config("bytes", L=1, D=16, F=24, N=4, K=2, H=4, V=256)
    (tmp_path / "model.json").write_text(json.dumps({x: getattr(config, x) for x in "LDFNKHV"}))
    (tmp_path / "run.toml").write_text(f"model = {json.dumps(str(tmp_path / 'model.json'))}\n")
    specs = transformer.specs_of(config)
    state = {"params": params, "optimizer": {"mu": params}}
    checkpoint.save(tmp_path, state, {"params": specs, "optimizer": {"mu": specs}}, AbstractMesh({}), 7)
    assert generate.main(["--model", str(tmp_path), "--prompt-ids", "1,2", "--max-new-tokens", "4"]) == 0
    wanted = serve.generate(params, [[1, 2]], config, 4)[0]
    assert [int(id) for id in capsys.readouterr().out.split()] == wanted


def served_on(Y: int, memory: int = 0) -> loading.Served:
    return loading.Served(Source(CONFIG), {"Y": Y}, memory=memory)


def test_what_does_not_fit_is_refused_beforehand(folder, capsys):
    weights = sum(p.nbytes for p in transformer.tree.leaves(params))
    room = weights + 100 * 2 * CONFIG.L * CONFIG.K * CONFIG.H * 4
    options = ["--model", str(folder), "--prompt", "ab", "--memory", str(room), "--max-new-tokens"]
    assert generate.main([*options, "99"]) == 1
    assert "give at most 100 tokens, with the completion" in capsys.readouterr().err
    assert generate.main([*options, "98"]) == 0
    with pytest.raises(ValueError, match="a larger mesh"):
        served_on(1, weights).check_fits(1, 10)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompt", ""], "the prompt is empty"), (["--prompt-ids", "1,x"], "whole numbers"),
        (["--prompt-ids", "256"], "token 256"), (["--prompt", "a", "--chat"], "no chat template"),
        (["--prompt", "a", "--mesh", "X=2"], "mesh axis X"), (["--prompt", "a", "--draft", "nowhere"], "unknown model"),
    ],
)  # fmt: skip
def test_generate_refuses(folder, options, named, capsys):
    assert generate.main(["--model", str(folder), *options]) == 1
    assert named in capsys.readouterr().err


def test_ends_and_chat_templates(tmp_path):
    assert ends_of(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert ends_of(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert ends_of(tmp_path) == (2, 5)
    pytest.importorskip("jinja2")
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    table = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(table))
    assert chat_prompt(tmp_path, [{"role": "user", "content": "hi"}]) == "<s>[user]hi[assistant]"


def test_serve_a_file(folder, tmp_path, capsys):
    """Good lines are served, each bad one is named by its number."""
    good = [
        {"prompt": "hello"}, {"id": "x", "ids": [1, 2, 3], "max_new_tokens": 3}, {"prompt": "hello", "arrival": 0.01},
        {"prompt": "ab", "temperature": 1.0, "top_k": 9, "seed": 4, "max_new_tokens": 6},
    ]  # fmt: skip
    bad = [
        "{", "[]", "{}", '{"prompt": ""}', '{"prompt": 5}', '{"ids": [256]}', '{"ids": [1], "prompt": "a"}',
        '{"prompt": "a", "top_p": 0}', '{"prompt": "a", "max_new_tokens": 0}', '{"prompt": "a", "size": 1}',
        '{"prompt": "a", "stop": [1]}', '{"prompt": "a", "arrival": -1}', '{"prompt": "a", "temperature": "x"}',
    ]  # fmt: skip
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*bad[:3], "", *map(json.dumps, good), *bad[3:]]))
    options = ["--model", str(folder), "--input", str(source), "--output", str(target), "--max-new-tokens", "8"]
    assert __main__.main(["serve", *options]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["line"] for row in rows if "error" in row] == [1, 2, 3, *range(9, 19)]
    said = capsys.readouterr().err
    for what in (
        "line 1: is not JSON",
        "line 2: not a JSON object",
        "line 3: one of",
        "line 11: the prompt: token",
        "top_p=0",
    ):
        assert what in said
    assert batch.main([*options, "--form", "sequence"]) == 1
    assert "a cache in pages cannot do" in capsys.readouterr().err
    source.write_text("{")
    assert __main__.main(["serve", *options]) == 1
    assert "0 of 1 served\n" in capsys.readouterr().out
    served = {row["id"]: row for row in rows if "error" not in row}
    assert list(served) == [5, "x", 7, 8]
    assert served[5]["ids"] == served[7]["ids"] == serve.generate(params, [list(b"hello")], CONFIG, 8)[0]
    assert served["x"]["ids"] == serve.generate(params, [[1, 2, 3]], CONFIG, 3)[0]
    assert served[8]["ids"] == serve.generate(params, [list(b"ab")], CONFIG, 6, temperature=1.0, top_k=9, seed=4)[0]
    assert served[5]["reason"] == "length"
    assert served[5]["ttft"] > 0
    stop = bytes(served[5]["ids"]).decode(errors="replace")[2]
    source.write_text(json.dumps({"prompt": "hello", "stop": stop}))
    for more in (["--policy", "static"], ["--draft", "ngram"], ["--draft", str(folder)]):
        assert batch.main([*options, *more]) == 0
        row = json.loads(target.read_text())
        assert row["reason"] == "stop"
        assert stop not in row["text"]
        assert row["ids"] == served[5]["ids"][: len(row["ids"])]
    source.write_text("\n".join(map(json.dumps, good)))
    assert batch.main([*options, "--draft", str(folder), "--proposals", "3"]) == 0
    assert [json.loads(line)["ids"] for line in target.read_text().splitlines()] == [r["ids"] for r in served.values()]


def test_requests_that_do_not_fit_the_pages_are_refused_alone(folder, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "aaaaaaaaaaaa"}\n{"prompt": "a"}\n')
    options = ["--model", str(folder), "--input", str(source), "--output", str(target), "--max-new-tokens", "3"]
    assert batch.main([*options, "--pages", "2", "--page", "4"]) == 0
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    assert "15 tokens with the completion, but only 8 fit" in first["error"]
    assert len(second["ids"]) == 3


def test_an_absurd_length_is_refused_alone(folder, tmp_path, capsys):
    """Without --pages the pool is as large as the requests need and memory allows; the others are served."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    table = [{"prompt": "ab"}, {"id": "x", "prompt": "a", "max_new_tokens": 10**9}, {"prompt": "abc"}]
    source.write_text("\n".join(map(json.dumps, table)))
    options = ["--model", str(folder), "--input", str(source), "--output", str(target), "--max-new-tokens", "3"]
    assert batch.main(options) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, "x", 3]
    assert [row.get("ids") for row in rows] == [
        serve.generate(params, [list(b"ab")], CONFIG, 3)[0], None, serve.generate(params, [list(b"abc")], CONFIG, 3)[0]
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "line 2: refused: 1000000001 tokens with the completion, where memory has room for" in " ".join(
        said.err.split()
    )
    assert said.out.startswith("2 of 3 served")
    weights = sum(p.nbytes for p in transformer.tree.leaves(params))
    page = 4 * 2 * CONFIG.L * CONFIG.K * CONFIG.H * 4
    small = ["--page", "4", "--memory", str(weights + 2 * page)]  # room for two pages: one request at a time
    assert batch.main([*options, *small]) == 0
    assert [json.loads(line).get("ids") for line in target.read_text().splitlines()] == [row.get("ids") for row in rows]
    assert batch.main([*options, "--page", "4", "--memory", str(weights)]) == 1
    assert "a larger mesh" in capsys.readouterr().err


def test_pages_for_the_longest_requests_at_once():
    lines = [RequestLine(n, 0.0, Request(n, (1,) * 3, n)) for n in (1, 9, 5, 97)]
    pages, served, refused = batch.pages_of(lines, 4, 2, 20)
    assert (pages, [line.request.id for line in served], [row["line"] for row in refused]) == (3 + 2, [1, 9, 5], [97])
    assert batch.pages_of(lines, 4, 8, 4)[0] == 4
    assert batch.pages_of(lines[3:], 4, 8, 4)[:2] == (1, [])


def test_rows_divide_only_over_the_axes_that_split_them():
    """Bytes of a cache on a mesh: its heads over Y, its rows over Z."""
    params_alone = served_on(1).needed(1, 64) - 64 * (token := 2 * CONFIG.L * CONFIG.K * CONFIG.H * 4)
    assert params_alone == sum(p.nbytes for p in transformer.tree.leaves(params))
    on_two = [served_on(2).needed(1, n) for n in (64, 128)]
    assert on_two[1] - on_two[0] == 64 * token // 2
    assert [served_on(2, on_two[1] - less).length_that_fits(1) for less in (0, 1)] == [128, 127]
