"""`python -m scaling.generate` and `python -m scaling.serve`; text as it is streamed."""

import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from machine import Forked
from refused import named
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scaling import __main__, launch, serve
from scaling.configs import Config, Linear
from scaling.configs.sources import Source
from scaling.mesh import AbstractMesh
from scaling.models import hf, transformer
from scaling.models.text import ByteText, tokenizer, write_bytes
from scaling.serve import command as batch
from scaling.serve import loading
from scaling.serve.requests import Request, RequestLine
from scaling.serve.text import TextStream
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


def test_a_stop_text_ends_the_text_wherever_tokens_begin():
    """Beside a search of the whole text, as it stands after each character: of several, the first that is complete."""
    chance = random.Random(1)
    for _ in range(300):
        text = "".join(chance.choice("ab") for _ in range(chance.randrange(1, 30)))
        stops = ["".join(chance.choice("ab") for _ in range(chance.randint(1, 6))) for _ in range(chance.randint(1, 3))]
        ends = [(end, len(stop)) for end in range(len(text) + 1) for stop in stops if text[:end].endswith(stop)]
        end, length = min(ends, key=lambda found: (found[0], -found[1]), default=(len(text), 0))
        stream = TextStream(ByteText(), stops)
        given = [stream.push(byte) for byte in text.encode()]
        assert "".join([*given, stream.rest()]) == text[: end - length], (text, stops)
        for n in range(1, len(text) + 1 if not ends else 0):  # nothing is held that is no start of a stop text
            held = text[len("".join(given[:n])) : n]
            assert held == max((s[:m] for s in stops for m in range(len(s)) if text[:n].endswith(s[:m])), key=len)


def test_a_token_takes_no_longer_for_a_long_stop_text():
    stream = TextStream(ByteText(), ["q" * 200_000, "q" * 100_000 + "r"])
    before = time.process_time()
    assert "".join(map(stream.push, b"q" * 20_000 + b"s")) == "q" * 20_000 + "s"
    assert time.process_time() - before < 2  # of 20,001 tokens; one took 1.7 s


@pytest.mark.parametrize("kind", ["Metaspace", "ByteLevel"])
def test_what_is_streamed_is_what_all_ids_are_together(kind, tmp_path):
    """Of tokenizers whose tokens have another text at the begin, or are parts of characters; with special ones. Up to a
    stop text, if it comes."""
    tokenizers, chance = pytest.importorskip("tokenizers"), random.Random(0)
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = ["<s>", "\u2581a", "\u2581b", "c", "\u2581", "d\u2581e", "\u00e9"]
    if kind == "ByteLevel":
        words = ["<s>", *sorted(alphabet.alphabet()), "\u0120the", "\u00c3\u00a9"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>")
    made = tokenizers.Tokenizer(model)
    made.decoder = getattr(tokenizers.decoders, kind)()
    made.add_special_tokens(["<s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    by = tokenizer(str(tmp_path))
    for i in range(60):
        text = "".join(chance.choice("aé€𝄞 \n") for _ in range(6))
        ids = [chance.randrange(len(words)) for _ in range(chance.randrange(1, 20))]
        if kind == "ByteLevel":
            spelled = "".join(piece for piece, _ in alphabet.pre_tokenize_str(text))
            ids = [words.index(character) for character in spelled] + [0, *ids[:1], 0]
        whole = by.decode(ids)
        begin = chance.randrange(len(whole) + 1)
        stop = whole[begin : begin + 2] if i % 2 else "zz"
        stream = TextStream(by, [stop, "zzz"])
        assert "".join([*map(stream.push, ids), stream.rest()]) == (whole.split(stop)[0] if stop else whole)
        assert len(stream.ids) < 12


@pytest.fixture
def said(folder, capsys):
    """What a command on the model says: its output and its errors, folded to one line."""

    def run(command, words, code=0):
        assert __main__.main([command, "--model", str(folder), *words]) == code
        out, error = capsys.readouterr()
        return out, " ".join(error.split())

    return run


def completed(prompt: bytes, new: int, **options) -> list[int]:
    return serve.generate(params, [list(prompt)], CONFIG, new, **options)[0]


def test_generate_says_what_the_model_says(said):
    wanted = completed(b"ab", 5)
    out, _ = said("generate", ["--max-new-tokens", "5", "--prompt-ids", "97,98"])
    assert [*map(int, out.split())] == wanted
    out, _ = said("generate", ["--max-new-tokens", "5", "--prompt", "ab", "--logprobs", "--draft", "ngram"])
    assert out.startswith(bytes(wanted).decode(errors="replace"))
    assert "over 5 tokens; perplexity" in out
    small = serve.quantize(params, CONFIG, "fp8-row")
    out, _ = said(
        "generate", ["--max-new-tokens", "5", "--prompt-ids", "97,98", "--weights", "fp8-row", "--cache", "fp8"]
    )
    assert [*map(int, out.split())] == serve.generate(small, [[97, 98]], CONFIG, 5, dtype=torch.float8_e4m3fn)[0]
    scores = [float(line.split()[0]) for line in said("generate", ["--prompt", "abc", "--score"])[0].splitlines()[:2]]
    assert scores == pytest.approx(serve.score(params, [list(b"abc")], CONFIG)[0], abs=1e-4)


def test_generate_from_a_run_that_kept_no_model(folder, tmp_path, capsys):
    """Its checkpoint holds the optimizer's state as well, which is not read."""
    (tmp_path / "run.toml").write_text(f"model = '{folder}/config.json'\n")
    specs = transformer.specs_of(CONFIG)
    types = {"params": specs, "optimizer": {"mu": specs}}
    checkpoint.save(tmp_path, {"params": params, "optimizer": {"mu": params}}, types, AbstractMesh({}), 7)
    assert __main__.main(f"generate --model {tmp_path} --prompt-ids 1,2 --max-new-tokens 4".split()) == 0
    assert [*map(int, capsys.readouterr().out.split())] == completed(bytes([1, 2]), 4)


# by what is said: flags of `generate`
REFUSED = named(
    """
words                  flags
the prompt is empty    ["--prompt", ""]
the prompt is not UTF  ["--prompt", "caf\\udce9"]
whole numbers          ["--prompt-ids", "1,x"]
--prompt-ids ''        ["--prompt-ids", ""]
no chat template       ["--prompt", "a", "--chat"]
mesh axis X            ["--prompt", "a", "--mesh", "X=2"]
unknown model          ["--prompt", "a", "--draft", "nowhere"]
a shard cuts no block  ["--prompt", "a", "--weights", "fp8-128"]
""",
    globals(),
)
WEIGHTS = sum(p.nbytes for p in transformer.tree.leaves(params))
TOKEN = 2 * CONFIG.L * CONFIG.K * CONFIG.H * 4  # bytes of a token's cache


def test_generate_refuses_what_it_cannot_do_and_what_does_not_fit_beforehand(said):
    for words, flags in REFUSED.items():
        assert words in said("generate", flags, code=1)[1]
    room = WEIGHTS + 100 * TOKEN
    options = ["--prompt", "ab", "--memory", str(room), "--max-new-tokens"]
    assert "give at most 100 tokens, with the completion" in said("generate", [*options, "99"], code=1)[1]
    said("generate", [*options, "98"])
    on_two = partial(loading.Served, Source(CONFIG), {"Y": 2})  # its heads over Y
    assert (full := on_two().needed(1, 128)) - on_two().needed(1, 64) == 64 * TOKEN // 2
    assert [on_two(memory=full - less).length_that_fits(1) for less in (0, 1)] == [128, 127]
    linear = CONFIG.with_(L=2, linear=Linear(2, 4, 8, 8, 4, (0,)))  # its state takes memory, too
    served = loading.Served(Source(linear), {})
    cache = serve.init_cache(linear, 3, 8, dtype=torch.float32)
    held = served.needed(3, 8) - transformer.tree.nbytes(transformer.init(linear, 0, device="meta"))
    assert held == sum(cache[name].nbytes for name in ("KV", "S", "tail"))
    served, layers = loading.Served(Source(CONFIG.with_(L=3, window=(None, 4, 4))), {}), CONFIG.L  # 16 tokens within it
    found = [served.needed(1, n, window_tokens=16) - served.needed(1, 8, window_tokens=16) for n in (16, 116)]
    assert found == [8 * TOKEN * 3 // layers, (8 * 3 + 100) * TOKEN // layers]
    for n in (10, 16, 17, 116):
        full = replace(served, memory=served.needed(1, n, window_tokens=16))
        less = replace(full, memory=full.memory - 1)
        assert [each.length_that_fits(1, window_tokens=16) for each in (full, less)] == [n, n - 1]
    available = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert launch.free_memory("cpu", 2) == pytest.approx(0.5 * available, rel=0.05)


GOOD = [
    {"prompt": "hello", "ids": None, "stop": None},  # null is as left out
    {"id": "x", "ids": [1, 2, 3], "max_new_tokens": 3}, {"prompt": "hello", "arrival": 0.01, "seed": None},
    {"prompt": "ab", "temperature": 1.0, "top_k": 9, "seed": 4, "max_new_tokens": 6},
]  # fmt: skip
BAD = {  # beside what calls over HTTP are refused for
    "{": "is not JSON", "[]": "not a JSON object", '{"ids": null}': "one of", '{"prompt": 5}': "is not a text",
    '{"ids": [1], "prompt": "a"}': "one of",
    '{"prompt": "a", "size": 1}': "unknown field 'size'", '{"prompt": "a", "arrival": -1}': "arrival=-1",
    '{"prompt": "a", "id": "\\ud800"}': "its id has half", '{"prompt": "a", "id": [1e400]}': "an infinite number",
    '{"prompt": "a", "temperature": "x"}': "temperature='x'", '{"prompt": "\\ud800"}': "half of a surrogate pair",
    f'{{"prompt": "a", "seed": {"9" * 4301}}}': "has a number of 4,301 digits",
}  # fmt: skip


@pytest.fixture
def served(said, tmp_path):
    """`python -m scaling.serve` on a file of these lines: (its rows, what it says, its errors)."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def run(lines, *options, code=0):
        texts = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
        source.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts))
        words = ["--input", str(source), "--output", str(target), "--max-new-tokens", "8", *options]
        out, error = said("serve", words, code)
        rows = [json.loads(line) for line in target.read_text().split("\n")[:-1]] if target.is_file() else []
        return rows, out, error

    return run


def test_serve_a_file(served, folder):
    """Good lines are served, each bad one is named by its number; a stop text ends a completion at its token."""
    rows, _, error = served(["", *BAD, *GOOD])
    for number, why in enumerate(BAD.values(), 2):
        assert f"line {number}: {why}" in error or why in rows[number - 2]["error"]
    assert [row["line"] for row in rows if "error" in row] == [*range(2, 2 + len(BAD))]
    good = rows[len(BAD) :]
    at = len(BAD) + 2  # the first good line; the first of all is empty
    assert [row["id"] for row in good] == [at, "x", at + 2, at + 3]
    hello = completed(b"hello", 8)
    drawn = completed(b"ab", 6, temperature=1.0, top_k=9, seed=4)
    assert [row["ids"] for row in good] == [hello, completed(bytes([1, 2, 3]), 3), hello, drawn]
    assert (good[0]["reason"], good[0]["ttft"] > 0) == ("length", True)
    texts = [ByteText().decode(hello[:n]) for n in range(9)]
    stop = texts[-1][2]
    first = next(n for n, text in enumerate(texts) if stop in text)
    for more in (["--policy", "static"], ["--draft", "ngram"], ["--draft", str(folder), "--proposals", "3"]):
        (*others, row), *_ = served([*GOOD, {"prompt": "hello", "stop": stop}], *more)
        assert (row["reason"], stop in row["text"], row["ids"]) == ("stop", False, hello[:first])
        assert [row["ids"] for row in others] == [row["ids"] for row in good]
    assert "a cache in pages cannot do" in served(GOOD, "--form", "sequence", code=1)[2]
    assert "0 of 1 served\n" in served(["{"], code=1)[1]
    assert "holds no request" in served([""], code=1)[2]


def test_a_line_of_a_file_is_utf8_and_ends_with_a_newline(served):
    """Not with the other line ends of Unicode, which a text may have."""
    text = "a\u2028b\x85c"
    (first, second), _, error = served([json.dumps({"prompt": text}, ensure_ascii=False), b'{"prompt": "caf\xe9"}'])
    assert first["ids"] == completed(text.encode(), 8)
    assert "line 2: is not JSON: 'utf-8' codec can't decode byte 0xe9" in error
    assert "is not JSON: 'utf-8'" in second["error"]


def test_a_line_whose_logits_are_not_finite_is_refused_alone(served, tmp_path, said):
    broken = params | {"embed": params["embed"].index_fill(0, torch.tensor([7]), torch.inf)}
    hf.save(tmp_path / "broken", CONFIG, broken)
    options = ["--model", str(tmp_path / "broken")]
    (first, second, third), out, error = served([{"prompt": "a"}, {"ids": [1, 7, 2]}, {"prompt": "hello"}], *options)
    assert second["error"].startswith("failed: logits without a finite maximum")
    assert "line 2: failed: logits without a finite maximum" in error
    assert [row["ids"] for row in (first, third)] == [completed(b"a", 8), completed(b"hello", 8)]
    assert out.startswith("2 of 3 served")
    assert "no token can be drawn" in said("generate", [*options, "--prompt-ids", "1,7"], 1)[1]


def test_requests_that_do_not_fit_are_refused_alone(served):
    """Those that a pool has no pages for; without --pages it is as large as the requests need and memory allows."""
    (first, second), *_ = served([{"prompt": "a" * 12}, {"prompt": "a"}], "--pages", "4", "--page", "4")
    assert "20 tokens with the completion, but only 16 fit" in first["error"]
    assert second["ids"] == completed(b"a", 8)
    table = [{"prompt": "ab"}, {"id": "x", "prompt": "a", "max_new_tokens": 10**9}, {"prompt": "abc"}]
    wanted = [completed(b"ab", 8), None, completed(b"abc", 8)]
    rows, out, error = served(table)
    assert ([row["id"] for row in rows], [row.get("ids") for row in rows]) == ([1, "x", 3], wanted)
    assert "line 2: refused: 1000000001 tokens with the completion, where memory has room for" in error
    assert out.startswith("2 of 3 served")
    small = ["--page", "4", "--memory", str(WEIGHTS + 3 * 4 * TOKEN)]  # room for three pages: one request at a time
    assert [row.get("ids") for row in served(table, *small)[0]] == wanted
    assert "a larger mesh" in served(table, "--page", "4", "--memory", str(WEIGHTS), code=1)[2]
    lines = [RequestLine(n, 0.0, Request(n, (1,) * 3, n)) for n in (1, 9, 5, 97)]
    pages, some, refused = batch.pages_of(lines, 4, 2, 20)  # there are pages for the longest at once
    assert (pages, [line.request.id for line in some], [row["line"] for row in refused]) == (3 + 2, [1, 9, 5], [97])
    assert batch.pages_of(lines, 4, 8, 4)[0] == 4
    assert batch.pages_of(lines[3:], 4, 8, 4)[:2] == (1, [])


@pytest.mark.slow
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_server_on_a_mesh_finishes_what_runs_at_ctrl_c(tmp_path, by_torchrun):
    for extra in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(extra, reason="the extra serve has it")
    httpx = pytest.importorskip("httpx", reason="the extra test has it")
    hf.save(tmp_path, LARGER, (own := transformer.init(LARGER, 3)))
    write_bytes(tmp_path)
    options = f"serve --model {tmp_path} --mesh Y=2 --port 0 --pages 600".split()

    def rank():
        os.setsid()  # a session of its own, as torchrun gives it
        os._exit(__main__.main(options))  # who returns is kept waiting for an agent that has ended

    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "serve"}
    agent = elastic_launch(LaunchConfig(1, 1, 2, start_method="fork", **meeting), rank)  # forks have torch already
    process = Forked(agent if by_torchrun else lambda: sys.exit(__main__.main(options)))
    url = next(line for line in process.stdout if "http://" in line).split()[1] + "/v1/completions"
    text = ByteText().decode(serve.generate(own, [[5, 6, 7]], LARGER, 15)[0])
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
    process.communicate(60)
    assert process.returncode == (1 if by_torchrun else 0)  # torchrun's own code for a signal
