"""`python -m scaling.serve --port`: what clients get beside what one request gives alone, and what none can break, by
servers of a tiny model in threads of this process; the openai package and a browser as clients."""

import functools
import gc
import itertools
import json
import random
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from scaling import serve
from scaling.configs import Config
from scaling.models import transformer
from scaling.models.text import ByteText
from scaling.serve.generation import stream
from scaling.serve.requests import Sampling
from scaling.serve.states import Options

for extra in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(extra, reason="the extras serve and test have it")

import httpx  # noqa: E402

from scaling.serve.web import app, server  # noqa: E402
from scaling.serve.web.words import Model  # noqa: E402

CONFIG = Config("tiny", L=2, D=24, F=48, N=6, K=3, H=4, V=256)
PARAMS = transformer.init(CONFIG, 3)
GREEDY = {"temperature": 0}


def chat(messages):
    if messages[0]["role"] not in ("system", "user"):
        raise ValueError("the first message is the user's")
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


class Running(NamedTuple):
    client: httpx.Client
    port: int
    stop: object
    errors: list  # what ended the loop

    def until(self, wanted, seconds: float = 20.0) -> dict:
        """The figures, once they are as wanted."""
        end = time.monotonic() + seconds
        while not wanted(now := self.client.get("/figures").json()):
            assert time.monotonic() < end, now
            time.sleep(0.01)
        return now

    def call(self, prompt=None, **body) -> httpx.Response:
        """What a completion of the prompt, or a chat of `messages`, is answered, all of it."""
        if "messages" in body:
            return self.client.post("/v1/chat/completions", json=body)
        return self.client.post("/v1/completions", json={"prompt": prompt} | body)

    def parts(self, **body) -> list[dict]:
        """What a call is answered: of a stream each event, else the one object."""
        answer = self.call(**body)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return [answer.json()]
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done = filter(None, answer.text.splitlines())
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def plain(self, prompt, **body) -> dict:
        return self.parts(prompt=prompt, **body)[0]

    def streamed(self, **body):
        """A stream of one completion."""
        return self.client.stream("POST", "/v1/completions", json=body | {"prompt": "a", "stream": True})


@contextmanager
def running(*, pages=64, page=4, slots=4, queue=100, key=None, params=PARAMS, ends=(), **engine):
    options = Options(pages, page, slots, budget=16, proposals=3 if "draft" in engine else 0)
    model = Model("tiny", ByteText(), CONFIG.V, ends, chat, options)
    listener, found, up, errors = server.listen("127.0.0.1", 0), [], threading.Event(), []
    port = listener.getsockname()[1]

    def ready(address, stop):
        assert address == f"http://127.0.0.1:{port}"
        found.append(stop)
        up.set()

    def serve():
        try:
            server.serve_http(params, model, CONFIG, listener, queue=queue, key=key, ready=ready, **engine)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert up.wait(30)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as client:
            yield Running(client, port, found[0], errors)
    finally:
        found[0](signal.SIGTERM)
        thread.join(30)
    assert not thread.is_alive()


def asked(served, body: dict) -> list[tuple[str, str, list[float]]]:
    """(text, reason, log-probabilities) of each answer; a stream says no more and no less than the whole does."""
    found: dict[int, tuple] = {}
    *_, last = parts = served.parts(**body)
    for choice in (choice for part in parts for choice in part["choices"]):
        said = choice.get("delta", choice.get("message", choice)).get("content", choice.get("text", ""))
        notes = choice["logprobs"] or {}
        told = [note["logprob"] for note in notes.get("content", [])] + notes.get("token_logprobs", [])
        text, reason, logprobs = found.get(choice["index"], ("", None, []))
        found[choice["index"]] = text + said, reason or choice["finish_reason"], logprobs + told
    usage, count = last["usage"], sum(len(logprobs) for *_, logprobs in found.values())
    assert (usage["completion_tokens"], usage["total_tokens"] - usage["prompt_tokens"]) == (count, count)
    return [found[index] for index in range(len(found))]


@functools.cache
def completed(prompts: tuple, count: int, how: Sampling, seed: int) -> list[list]:
    """The tokens of each prompt by `stream`, without a server."""
    steps = [*stream(PARAMS, prompts, CONFIG, count, how, seed=seed)]
    return [[token for step in steps for token in step if token.row == row] for row in range(len(prompts))]


def drawn(count: int, seed: int) -> list[dict]:
    """Random calls, of which some prompts begin alike: ids, texts or chats, streamed or not, some up to a text."""
    chance = random.Random(seed)
    starts, calls = [[chance.randrange(256) for _ in range(12)] for _ in range(3)], []
    for _ in range(count):
        own = [chance.randrange(256) for _ in range(chance.randint(1, 20))]
        ids = chance.choice(starts)[: chance.randrange(13)] + own
        text = "".join(chr(97 + id % 26) for id in ids)
        body = {"max_tokens": chance.randint(1, 24), "n": chance.choice([1, 1, 2])}
        body |= chance.choice([GREEDY, {"temperature": 0.8, "seed": 7, "top_k": 9}])
        body |= chance.choice([{}, {"stream": True, "stream_options": {"include_usage": True}}])
        prompts = [{"prompt": ids}, {"prompt": [text, ids]}, {"messages": [{"role": "user", "content": text}]}]
        body |= chance.choice(prompts)
        body |= {"logprobs": True, "top_logprobs": 0} if "messages" in body else {"logprobs": 0}
        (text, _, _), *_ = alone(body)
        stop = text[len(text) // 2 :][:2]
        calls.append(body | ({"stop": [stop, "never"]} if stop and stop.isascii() and chance.random() < 0.6 else {}))
    return calls


def alone(body: dict) -> list[tuple[str, str, list[float]]]:
    """What `asked` should say: each answer up to the first place where a stop text has come."""
    prompts = [chat(body["messages"])] if "messages" in body else body["prompt"]
    prompts = prompts if isinstance(prompts[0], str | list) else [prompts]
    prompts = [tuple(p.encode() if isinstance(p, str) else p) for p in prompts for _ in range(body["n"])]
    how, found = Sampling(body["temperature"], body.get("top_k")), []
    for tokens in completed(tuple(prompts), body["max_tokens"], how, body.get("seed", 0)):
        texts = [ByteText().decode([token.id for token in tokens[:count]]) for count in range(len(tokens) + 1)]
        stop = body.get("stop", ["never"])[0]
        count = next((count for count, text in enumerate(texts) if stop in text), len(tokens))
        reason = "stop" if stop in texts[count] else "length"
        logprobs = [token.logprob for token in tokens[:count]]
        found.append((texts[count].split(stop)[0], reason, pytest.approx(logprobs, abs=1e-4)))
    return found


def raw(port: int, data: bytes, seconds: float = 20.0) -> bytes:
    """What comes back for these bytes, up to where the server closes or the client has had enough."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as s:
        try:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            return s.recv(1 << 16)
        except OSError:
            return b""


def post(body: bytes, path: str = "/v1/completions", head: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


BODIES = [
    b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": ' + b"9" * 100_000 + b"}", b'{"max_tokens": 1e999, "prompt": "a"}',
    b'{"prompt": "a", "temperature": NaN}', b"\xff\xfe{}", b"", b"null", b"[]", b'{"prompt": "\\ud800"}',
    b'{"prompt": [' + b"[1]," * 5_000 + b"[1]]}", b'{"prompt": [1, "a"]}', b'{"prompt": "a", "stop": ["\\ud800"]}',
    b'{"prompt": "' + b"a" * 200_000 + b'"}', b'{"messages": [{"role": "user"}]}', b'{"messages": "\\u0000"}',
    b'{"prompt": [99999999999999999999]}',
]  # fmt: skip
VALUES = [None, -1, 0, 1 << 70, 1e308, "", "\x00", [], {}, True, ["a", 1], {"a": None}, "é" * 50, [[1], "a"]]
HEADS = [f"Content-Length: {length}" for length in (-1, 3, 10**9)] + ["Transfer-Encoding: chunked", "Expect: nothing"]
HEADS += ["X: " + "a" * 100_000, "Host: y", ":"]
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/nothing", "/" + "a" * 5000]


def malformed(count: int, seed: int):
    """(bytes of a call) that is wrong in its body, its head or its ways; some may be right by chance."""
    chance = random.Random(seed)
    good = {"prompt": "ab", "max_tokens": 2, "temperature": 0, "stop": ["x"], "n": 1, "seed": 1, "stream": False}
    for i in range(count):
        body = json.dumps({**good, chance.choice([*good, "zz"]): chance.choice(VALUES)}).encode()
        path = chance.choice(PATHS)
        whole = post(body, path)
        yield [
            whole,
            post(chance.choice(BODIES), path),
            post(bytes(b ^ (chance.random() < 0.02) for b in body), path),
            whole[: chance.randrange(len(whole))],  # cut anywhere, in its head or its body
            chance.randbytes(chance.randrange(1, 3000)),
            post(body, path, chance.choice(HEADS) + "\r\n"),
        ][i % 6]


@pytest.fixture(scope="module")
def served():
    """The tiny model's server, for all tests of this file."""
    with running() as found:
        yield found


@pytest.mark.parametrize("count", [16, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("options", [{"pages": 18}, {"draft": "ngram", "pages": 18}])
@pytest.mark.slow
def test_each_of_many_at_once_gets_what_it_gets_alone(options, count):
    """Batched, preempted, prefixed and speculated."""
    calls = drawn(count, count)
    with running(**options) as found, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: asked(found, body), calls))
        assert found.until(lambda now: not now["running"])["pages_held"] == 0
    for body, answer in zip(calls, answers, strict=True):
        assert answer == alone(body), body


def test_the_fields_of_an_answer(served):
    """As OpenAI's reference has them: notes of tokens, indices of answers, the begin of a chat's stream, ends."""
    body = {"prompt": "ab", "max_tokens": 6, "logprobs": 3, **GREEDY}
    notes = [part["choices"][0]["logprobs"] for part in served.parts(**body, stream=True)]
    notes = {name: [one for note in notes for one in note[name]] for name in notes[0]}
    assert notes == served.plain(**body)["choices"][0]["logprobs"]
    assert [max(top.values()) for top in notes["top_logprobs"]] == pytest.approx(notes["token_logprobs"])  # greedy
    assert all(token in top for token, top in zip(notes["tokens"], notes["top_logprobs"], strict=True))
    assert notes["text_offset"] == [*itertools.accumulate(map(len, notes["tokens"][:-1]), initial=0)]
    assert served.plain(["ab", "cd", "ab"], n=2)["usage"]["prompt_tokens"] == 6
    assert len({served.plain("ab", max_tokens=8)["choices"][0]["text"] for _ in range(4)}) > 1  # no seed: any
    asks = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    whole = served.call(**asks).json()
    assert (whole["object"], whole["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
    assert whole["usage"]["total_tokens"] == 256  # as much as fits
    body = asks | {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 2, "stream": True}
    first, *parts = served.parts(**body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    told = [note for part in parts for note in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [len(note["top_logprobs"]) for note in told] == [2] * 6
    with running(ends=tuple(range(128, 256))) as other:  # ids that end a text
        choice = other.plain("ab", max_tokens=50, seed=3)["choices"][0]
        assert (choice["finish_reason"], "\ufffd" in choice["text"]) == ("stop", False)


HI = [{"role": "user", "content": "a"}]
REFUSED = {  # by the words of the reason, beside what `python -m scaling.serve` refuses in a file
    "no prompt": {"prompt": None}, "prompt is empty": {"prompt": ""}, "neither a text nor": {"prompt": 3},
    "n=65": {"n": 65}, "max_tokens=0": {"max_tokens": 0}, "token 256": {"prompt": [256]},
    "only 256 fit": {"max_tokens": 999},
    "top_p=0": {"top_p": 0}, "field 'zz'": {"zz": 1}, "fix: give 'tiny'": {"model": "gpt-4"},
    "logprobs=6": {"logprobs": 6}, "stream='yes'": {"stream": "yes"}, "echo is not": {"echo": True},
    "penalty": {"frequency_penalty": 0.5}, "stop is not": {"stop": [""]}, "seed=1.5": {"seed": 1.5},
    "messages is not": {"messages": []}, "messages[0]: its content": {"messages": [{"role": "user"}]},
    "the first message is the user's": {"messages": [{"role": "tool", "content": "a"}]},
    "logprobs: true": {"messages": HI, "top_logprobs": 2},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_wrong_is_refused_with_the_reason(served, words):
    body = REFUSED[words]
    answer = served.call(**{"prompt": "a"} | body)
    assert answer.status_code == (404 if "model" in body else 400)
    assert words in answer.json()["error"]["message"]


def test_addresses(served):
    assert served.client.get("/health").json() == {"status": "ok"}
    assert [m["id"] for m in served.client.get("/v1/models").json()["data"]] == ["tiny"]
    assert served.client.get("/v1/models/tiny").json()["id"] == "tiny"
    for method, path, status in (("GET", "/v1/models/x", 404), ("GET", "/x", 404), ("GET", "/v1/completions", 405)):
        answer = served.client.request(method, path)
        assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True)
    page = served.client.get("/")
    assert "http" not in page.text.replace("<meta http-equiv", "")  # nothing comes from outside
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    served.plain("ab", max_tokens=2)
    told = served.client.get("/metrics").text
    for name in ("generated_tokens_total", "time_to_first_token_seconds_count", "time_per_output_token_seconds_sum",
                 "waiting", "pages_held", "tokens_per_second", 'requests_total{reason="length"}'):  # fmt: skip
        assert f"\nscaling_{name} " in told


def test_a_key():
    with running(key="sesame") as found:
        assert found.client.get("/v1/models").status_code == 200
        for key in ("", "Bearer é".encode(), "Basic sesame"):
            for path, status in (("/v1/models", 401), ("/metrics", 401), ("/figures", 401), ("/health", 200)):
                assert found.client.get(path, headers={"Authorization": key}).status_code == status


def test_a_full_queue_and_a_second_ctrl_c():
    """The second ends what runs. Each reaches a rank twice: by itself, and as the SIGTERM that the process which
    started it sends."""
    with running(slots=1, queue=1, pages=6000) as found:
        with found.streamed(max_tokens=1900) as first:
            lines = first.iter_lines()
            next(lines)
            refused = found.call("a", n=2)
            assert refused.status_code == 429
            assert "fix: try again later" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        found.until(lambda now: not now["running"])  # the first has gone
        assert found.plain("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        with found.streamed(max_tokens=20_000) as long:
            lines = long.iter_lines()
            next(lines)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                found.stop(number)
            with pytest.raises(httpx.HTTPError):
                list(lines)


@pytest.mark.slow
def test_clients_that_vanish_free_their_pages():
    with running(pages=512) as found:
        for streamed in (True, False):
            body = json.dumps({"prompt": "ab", "max_tokens": 2000, "stream": streamed, "n": 2}).encode()
            sockets = [socket.create_connection(("127.0.0.1", found.port)) for _ in range(10)]
            for s in sockets:
                s.sendall(post(body))
            found.until(lambda now: now["running"] + now["waiting"] == 20)
            if streamed:
                assert b"200 OK" in sockets[0].recv(1000)
            for s in sockets:
                s.close()
            assert found.until(lambda now: not now["running"] + now["waiting"])["pages_held"] == 0
        assert 'requests_total{reason="cancelled"} 40.0' in found.client.get("/metrics").text


@pytest.mark.slow
def test_malformed_calls_and_the_next_good_one(served):
    wanted = served.plain("ab", max_tokens=3, **GREEDY)["choices"]
    for data in malformed(300, 2):
        status = raw(served.port, data)[9:12]
        assert status in (b"", b"200", b"400", b"404", b"408", b"413", b"405", b"431"), (data[:200], status)
    assert served.plain("ab", max_tokens=3, **GREEDY)["choices"] == wanted
    assert not served.errors


def test_too_long_and_too_slow(monkeypatch):
    monkeypatch.setattr(app, "PATIENCE", 0.3)
    monkeypatch.setattr(server, "PATIENCE", 0.3)
    with running() as found:
        assert found.client.post("/v1/completions", content=b" " * (5 << 20)).status_code == 413
        slow = [socket.create_connection(("127.0.0.1", found.port), timeout=10) for _ in range(3)]
        slow[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")  # a head without an end
        slow[1].sendall(post(b"x" * 9)[:-3])  # a body without one
        assert found.plain("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert slow[0].recv(100) == b""
        assert b"408" in slow[1].recv(100)
        assert slow[2].recv(100) == b""
        for s in slow:
            s.close()


def test_an_engine_that_ends_says_so_to_all():
    broken = {**PARAMS, "norm": torch.full_like(PARAMS["norm"], torch.nan)}
    with running(params=broken) as found:
        answer = found.call("ab")
        assert answer.status_code == 503
        assert "no token can be drawn" in answer.json()["error"]["message"]
    assert "no token can be drawn" in str(found.errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_nothing_is_kept_of_requests_that_are_over(served, count):
    """Neither objects nor memory."""

    def after(count: int) -> tuple[int, int]:
        for i in range(count):
            served.plain([i % 256, 1, 2], max_tokens=2, stop=["zz"], logprobs=1)
            served.parts(prompt=[i % 256, 2, 1], max_tokens=2, stop=["zz"], stream=True)
        gc.collect()
        objects = sum(type(x).__name__ not in ("TimerHandle", "Context") for x in gc.get_objects())  # for seconds
        return objects, int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    after(50)  # until the caches are full, of prefixes and of timers
    (objects, memory), (more, grown) = after(10), after(count // 2)
    assert more - objects < 100
    assert grown - memory < 8 << 20


@pytest.mark.slow
def test_the_openai_package(served):
    openai = pytest.importorskip("openai", reason="the extra test has it")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0}
        whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2).choices[0]
        parts = client.chat.completions.create(**ask, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
        assert len(whole.logprobs.content) == 9
        plain_text = client.completions.create(model="tiny", prompt="ab", max_tokens=9, seed=1, stop=["zz"])
        assert plain_text.usage.completion_tokens <= 9
        for error, options in ((openai.BadRequestError, {"max_tokens": 0}), (openai.NotFoundError, {"model": "x"})):
            with pytest.raises(error):
                client.chat.completions.create(**ask | options)
        client.chat.completions.create(**ask | {"max_tokens": 200, "stream": True}).close()
        assert served.until(lambda now: not now["running"] + now["waiting"])["pages_held"] == 0


@pytest.mark.slow
def test_the_page_in_a_browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    browser = shutil.which("chromium") or pytest.skip("no chromium")
    with running() as found, playwright.sync_playwright() as play:
        page = play.chromium.launch(executable_path=browser, args=["--no-sandbox"]).new_page()
        wrong, reached, expect = [], set(), playwright.expect
        page.on("pageerror", lambda error: wrong.append(error))
        page.on("request", lambda request: reached.add(request.url.split("/")[2]))
        page.goto(f"http://127.0.0.1:{found.port}/")
        expect(page.locator("#name")).to_have_text("tiny")
        expect(page.locator("#pages")).to_have_text("64")
        page.fill("#temperature", "0")
        page.fill("#most", "5")
        page.fill("#text", "hi <b>")
        page.press("#text", "Enter")
        expect(page.locator("#send")).to_have_text("Send")
        said = chat([{"role": "user", "content": "hi <b>"}])
        wanted = ByteText().decode(serve.generate(PARAMS, [list(said.encode())], CONFIG, 5)[0])
        until = time.monotonic() + 10
        while page.locator(".assistant").text_content() != wanted:
            assert time.monotonic() < until, page.locator(".assistant").text_content()
        page.fill("#text", "a" * 300)
        page.click("#send")
        expect(page.locator(".error")).to_contain_text("only 256 fit")
        assert reached == {f"127.0.0.1:{found.port}"}
        assert not wrong
