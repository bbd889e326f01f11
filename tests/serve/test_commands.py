"""`python -m scaling.generate` and `python -m scaling.serve`; text as it is streamed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scaling import __main__, serve
from scaling.configs import Config
from scaling.configs.sources import Source
from scaling.generate import command as generate
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer
from scaling.models.text import ByteText, tokenizer_of, write_bytes
from scaling.serve import command as batch
from scaling.serve import loading
from scaling.serve.requests import Request, RequestLine
from scaling.serve.text import TextStream, chat_prompt, ends_of
from scaling.train import checkpoint

CONFIG = Config("tiny", L=1, D=16, F=24, N=4, K=2, H=4, V=256)
LARGER = CONFIG.with_(name="larger", L=2, V=258)  # of bytes and two ids more, as write_bytes has them
params = transformer.init(CONFIG, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf.save(path, CONFIG, params)
    return path


def test_text_goes_out_as_soon_as_it_is_certain():
    text, stream = "aß€𝄞!", TextStream(ByteText())
    assert [*filter(None, map(stream.push, text.encode()))] == [*text]
    stream = TextStream(ByteText(), ["END", "xx"])
    assert [stream.push(b) for b in b"aE xENDx"] == ["a", "", "E ", "", "x", "", "", ""]
    stream = TextStream(ByteText())
    assert "".join([*map(stream.push, (97, 300, 240)), stream.rest()]) == "a\ufffd"  # an id beyond, half a character


class Loaded:
    """A tokenizer that decodes ids only together."""

    def __init__(self, loaded):
        self.loaded = loaded

    def decode(self, ids):
        return self.loaded.decode(list(ids))

    def reader(self):
        return None


@pytest.mark.parametrize("kind", ["Metaspace", "ByteLevel"])
def test_what_is_streamed_is_what_all_ids_are_together(kind):
    """Of tokenizers whose tokens have another text at the begin, or are parts of characters; with special ones. Up to a
    stop text, if it comes."""
    tokenizers, chance = pytest.importorskip("tokenizers"), random.Random(0)
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = ["<s>", "\u2581a", "\u2581b", "c", "\u2581", "d\u2581e", "\u00e9"]
    if kind == "ByteLevel":
        words = ["<s>", *sorted(alphabet.alphabet()), "\u0120the", "\u00c3\u00a9"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>")
    tokenizer = Loaded(tokenizers.Tokenizer(model))
    tokenizer.loaded.decoder = getattr(tokenizers.decoders, kind)()
    tokenizer.loaded.add_special_tokens(["<s>"])
    for i in range(60):
        text = "".join(chance.choice("aé€𝄞 \n") for _ in range(6))
        ids = [chance.randrange(len(words)) for _ in range(chance.randrange(1, 20))]
        if kind == "ByteLevel":
            spelled = "".join(piece for piece, _ in alphabet.pre_tokenize_str(text))
            ids = [words.index(character) for character in spelled] + [0, *ids[:1], 0]
        whole = tokenizer.decode(ids)
        begin = chance.randrange(len(whole) + 1)
        stop = whole[begin : begin + 2] if i % 2 else "zz"
        stream = TextStream(tokenizer, [stop, "zzz"])
        assert "".join([*map(stream.push, ids), stream.rest()]) == (whole.split(stop)[0] if stop else whole)
        assert len(stream.ids) < 12


def test_a_folders_tokenizer_without_its_library(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"fix: pip install 'scaling-book-torch\[hf\]'"):
        tokenizer_of(tmp_path, 9)


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
    on_two = [served_on(2).needed(1, n) for n in (64, 128)]  # its heads over Y
    assert on_two[1] - on_two[0] == 64 * (room - weights) // 100 // 2
    assert [served_on(2, on_two[1] - less).length_that_fits(1) for less in (0, 1)] == [128, 127]
    available = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert loading.free_memory("cpu", 2) == pytest.approx(0.45 * available, rel=0.05)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompt", ""], "the prompt is empty"), (["--prompt-ids", "1,x"], "whole numbers"),
        (["--prompt", "a", "--chat"], "no chat template"),
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


GOOD = [
    {"prompt": "hello", "ids": None, "stop": None},  # null is as left out
    {"id": "x", "ids": [1, 2, 3], "max_new_tokens": 3}, {"prompt": "hello", "arrival": 0.01, "seed": None},
    {"prompt": "ab", "temperature": 1.0, "top_k": 9, "seed": 4, "max_new_tokens": 6},
]  # fmt: skip
BAD = {  # beside what calls over HTTP are refused for
    "{": "is not JSON", "[]": "not a JSON object", '{"ids": null}': "one of", '{"prompt": 5}': "is not a text",
    '{"ids": [1], "prompt": "a"}': "one of",
    '{"prompt": "a", "size": 1}': "unknown field 'size'", '{"prompt": "a", "arrival": -1}': "arrival=-1",
    '{"prompt": "a", "temperature": "x"}': "temperature='x'",
}  # fmt: skip


@pytest.fixture
def served(folder, tmp_path, capsys):
    """`python -m scaling.serve` on a file of these lines: (its rows, what it says, its errors)."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, *options, code=0):
        source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        words = ["--model", str(folder), "--input", str(source), "--output", str(target), "--max-new-tokens", "8"]
        assert __main__.main(["serve", *words, *options]) == code
        said = capsys.readouterr()
        rows = [json.loads(line) for line in target.read_text().splitlines()] if target.is_file() else []
        return rows, said.out, " ".join(said.err.split())

    return run


def completed(prompt: bytes, new: int, **options) -> list[int]:
    return serve.generate(params, [list(prompt)], CONFIG, new, **options)[0]


def test_serve_a_file(served, folder):
    """Good lines are served, each bad one is named by its number."""
    rows, _, said = served(["", *BAD, *GOOD])
    for number, why in enumerate(BAD.values(), 2):
        assert f"line {number}: {why}" in said or why in rows[number - 2]["error"]
    assert [row["line"] for row in rows if "error" in row] == [*range(2, 2 + len(BAD))]
    good = rows[len(BAD) :]
    assert [row["id"] for row in good] == [10, "x", 12, 13]
    hello = completed(b"hello", 8)
    drawn = completed(b"ab", 6, temperature=1.0, top_k=9, seed=4)
    assert [row["ids"] for row in good] == [hello, completed(bytes([1, 2, 3]), 3), hello, drawn]
    assert (good[0]["reason"], good[0]["ttft"] > 0) == ("length", True)
    stop = bytes(hello).decode(errors="replace")[2]
    for more in (["--policy", "static"], ["--draft", "ngram"], ["--draft", str(folder), "--proposals", "3"]):
        (row,), *_ = served([{"prompt": "hello", "stop": stop}], *more)
        assert (row["reason"], stop in row["text"], row["ids"]) == ("stop", False, hello[: len(row["ids"])])
        assert [row["ids"] for row in served(GOOD, *more)[0]] == [row["ids"] for row in good]
    assert "a cache in pages cannot do" in served(GOOD, "--form", "sequence", code=1)[2]
    assert "0 of 1 served\n" in served(["{"], code=1)[1]
    assert "holds no request" in served([""], code=1)[2]


def test_requests_that_do_not_fit_are_refused_alone(served):
    """Those that a pool has no pages for; without --pages it is as large as the requests need and memory allows."""
    (first, second), *_ = served([{"prompt": "a" * 12}, {"prompt": "a"}], "--pages", "4", "--page", "4")
    assert "20 tokens with the completion, but only 16 fit" in first["error"]
    assert second["ids"] == completed(b"a", 8)
    table = [{"prompt": "ab"}, {"id": "x", "prompt": "a", "max_new_tokens": 10**9}, {"prompt": "abc"}]
    wanted = [completed(b"ab", 8), None, completed(b"abc", 8)]
    rows, out, said = served(table)
    assert ([row["id"] for row in rows], [row.get("ids") for row in rows]) == ([1, "x", 3], wanted)
    assert "line 2: refused: 1000000001 tokens with the completion, where memory has room for" in said
    assert out.startswith("2 of 3 served")
    weights = sum(p.nbytes for p in transformer.tree.leaves(params))
    page = 4 * 2 * CONFIG.L * CONFIG.K * CONFIG.H * 4
    small = ["--page", "4", "--memory", str(weights + 3 * page)]  # room for three pages: one request at a time
    assert [row.get("ids") for row in served(table, *small)[0]] == wanted
    assert "a larger mesh" in served(table, "--page", "4", "--memory", str(weights), code=1)[2]


def test_pages_for_the_longest_requests_at_once():
    lines = [RequestLine(n, 0.0, Request(n, (1,) * 3, n)) for n in (1, 9, 5, 97)]
    pages, served, refused = batch.pages_of(lines, 4, 2, 20)
    assert (pages, [line.request.id for line in served], [row["line"] for row in refused]) == (3 + 2, [1, 9, 5], [97])
    assert batch.pages_of(lines, 4, 8, 4)[0] == 4
    assert batch.pages_of(lines[3:], 4, 8, 4)[:2] == (1, [])


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_server_on_a_mesh_finishes_what_runs_at_ctrl_c(tmp_path, torchrun):
    for extra in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(extra, reason="the extra serve has it")
    httpx = pytest.importorskip("httpx", reason="the extra test has it")
    hf.save(tmp_path, LARGER, (params := transformer.init(LARGER, 3)))
    write_bytes(tmp_path)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    options = f"-m scaling.serve --model {tmp_path} --mesh Y=2 --port 0 --pages 600".split()
    command, out = [sys.executable, *start, *options], subprocess.PIPE
    error = subprocess.DEVNULL if torchrun else None  # its traceback of the signal
    with subprocess.Popen(command, stdout=out, stderr=error, text=True, start_new_session=True) as process:
        url = process.stdout.readline().split()[1] + "/v1/completions"
        text = ByteText().decode(serve.generate(params, [[5, 6, 7]], LARGER, 15)[0])
        stop = text[-4:-1]  # a text that all ranks have to see
        asked = {"prompt": [5, 6, 7], "max_tokens": 15, "stop": stop, "temperature": 0}
        answer = httpx.post(url, json=asked, timeout=60).json()["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (text[: text.index(stop)], "stop")
        body = {"prompt": [5], "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", url, json=body, timeout=100) as long:
            lines = long.iter_lines()
            next(lines)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            *_, usage, done = (line for line in lines if line)
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 60
        assert done == "data: [DONE]"
        assert process.wait(60) == (1 if torchrun else 0)  # torchrun's own code for a signal
