"""`python -m scaling.serve --port`: what clients get beside what one request gives alone, and what none can break."""

import gc
import json
import random
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scaling import serve
from scaling.models.text import ByteText
from scaling.serve.generation import stream
from scaling.serve.requests import Sampling

for extra in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(extra, reason="the extras serve and test have it")

import httpx  # noqa: E402
from http_server import CONFIG, PARAMS, chat, malformed, post, raw, running  # noqa: E402

from scaling.serve.web import app, server  # noqa: E402

GREEDY = {"temperature": 0}


def plain(served, prompt, **options) -> dict:
    answer = served.client.post("/v1/completions", json={"prompt": prompt} | options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(ids) -> str:
    return ByteText().decode(ids)


def drawn(count: int, seed: int) -> list[dict]:
    """Random requests, of which some begin alike."""
    random_ = random.Random(seed)
    starts = [[random_.randrange(256) for _ in range(12)] for _ in range(3)]
    requests = []
    for _ in range(count):
        own = [random_.randrange(256) for _ in range(random_.randrange(1, 30))]
        prompt = random_.choice(starts)[: random_.randrange(13)] + own
        how = random_.choice([GREEDY, {"temperature": 0.8, "seed": 7, "top_k": 9}])
        requests.append({"prompt": prompt, "max_tokens": random_.randrange(1, 25), "logprobs": 0, **how})
    return requests


def alone(request: dict) -> tuple[str, list[float]]:
    how = Sampling(request["temperature"], request.get("top_k"))
    steps = stream(PARAMS, [request["prompt"]], CONFIG, request["max_tokens"], how, seed=request.get("seed", 0))
    tokens = [token for step in steps for token in step]
    return text_of([token.id for token in tokens]), [token.logprob for token in tokens]


@pytest.mark.parametrize(
    "count", [pytest.param(30, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize("options", [{}, {"pages": 18}, {"draft": "ngram", "pages": 18}])
def test_each_of_many_at_once_gets_what_it_gets_alone(options, count):
    requests = drawn(count, count)
    with running(**options) as found, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda r: plain(found, **r)["choices"][0], requests))
        assert found.until(lambda now: not now["running"])["pages_held"] == 0
    for request, answer in zip(requests, answers, strict=True):
        text, logprobs = alone(request)
        assert answer["text"] == text
        assert answer["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert answer["finish_reason"] == "length"


def test_usage_logprobs_and_several_answers(served):
    found = plain(served, "ab", max_tokens=4, logprobs=3, **GREEDY)
    wanted = serve.generate(PARAMS, [list(b"ab")], CONFIG, 4)[0]
    choice = found["choices"][0]
    assert choice["text"] == text_of(wanted)
    assert found["usage"]["prompt_tokens"] == 2
    assert found["usage"]["total_tokens"] == 6
    for token, logprob, top in zip(
        *(choice["logprobs"][n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert max(top.values()) == pytest.approx(logprob, abs=1e-6)  # greedy
        assert token in top
    many = plain(served, ["ab", "cd", "ab"], max_tokens=3, n=2, seed=5, temperature=1)
    prompts = [list(p) for p in (b"ab", b"ab", b"cd", b"cd", b"ab", b"ab")]
    wanted = serve.generate(PARAMS, prompts, CONFIG, 3, temperature=1, seed=5)
    assert [c["text"] for c in many["choices"]] == [text_of(ids) for ids in wanted]
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3, 4, 5]
    assert many["usage"]["prompt_tokens"] == 6
    assert len({plain(served, "ab", max_tokens=8)["choices"][0]["text"] for _ in range(4)}) > 1  # no seed: any


def test_a_stop_text_ends_an_answer_before_it(served):
    whole = plain(served, "ab", max_tokens=20, seed=3)["choices"][0]["text"]
    stop = whole[5:7]
    found = plain(served, "ab", max_tokens=20, seed=3, stop=[stop, "never there"])["choices"][0]
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"
    with running(ends=tuple(range(128, 256))) as other:  # ids that end a text
        found = plain(other, "ab", max_tokens=50, seed=3)
        assert found["choices"][0]["finish_reason"] == "stop"
        assert "\ufffd" not in found["choices"][0]["text"]


def test_a_stream_says_what_the_whole_answer_says(served):
    body = {"prompt": "ab", "max_tokens": 12, "seed": 3, "n": 2, "logprobs": 1}
    whole = plain(served, **body)["choices"]
    with served.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = [event["choices"][0] for event in events(response)]
    for index, choice in enumerate(whole):
        mine = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in mine) == choice["text"]
        told = [p for part in mine for p in part["logprobs"]["token_logprobs"]]
        assert told == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        offsets = [at for part in mine for at in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == ["length"]


def test_chat(served):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {"messages": messages, "max_completion_tokens": 6, "logprobs": True, "top_logprobs": 2, **GREEDY}
    found = served.client.post("/v1/chat/completions", json=body).json()
    prompt = list(chat([{"role": "user", "content": "hi"}]).encode())
    text = text_of(serve.generate(PARAMS, [prompt], CONFIG, 6)[0])
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert [len(t["top_logprobs"]) for t in found["choices"][0]["logprobs"]["content"]] == [2] * 6
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with served.client.stream("POST", "/v1/chat/completions", json=body | options) as response:
        *parts, last = events(response)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == text
    assert last["usage"]["completion_tokens"] == 6
    assert last["choices"] == []
    long = served.client.post("/v1/chat/completions", json={"messages": messages}).json()
    assert long["usage"]["total_tokens"] == 256  # as much as fits


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 400, "no prompt"), ({"prompt": ""}, 400, "prompt is empty"), ({"prompt": 3}, 400, "neither a text nor"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0"), ({"prompt": [256]}, 400, "token 256"),
        ({"prompt": "a", "max_tokens": 999}, 400, "only 256 fit"), ({"prompt": "a" * 300}, 400, "only 256 fit"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature=-1"), ({"prompt": "a", "top_p": 0}, 400, "top_p=0"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "fix: give 'tiny'"), ({"prompt": "a", "zz": 1}, 400, "field 'zz'"),
        ({"prompt": "a", "n": 65}, 400, "n=65"), ({"prompt": "a", "logprobs": 6}, 400, "logprobs=6"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream='yes'"), ({"prompt": "a", "echo": True}, 400, "echo is not"),
        ({"prompt": "a", "frequency_penalty": 0.5}, 400, "penalty"), ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": "a", "seed": 1.5}, 400, "seed=1.5"), ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0]: its content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "the first message is the user's"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "logprobs: true"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_the_reason(served, body, status, named):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = served.client.post(path, json=body)
    assert answer.status_code == status
    assert named in answer.json()["error"]["message"]


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
    plain(served, "ab", max_tokens=2)
    told = served.client.get("/metrics").text
    for name in ("generated_tokens_total", "time_to_first_token_seconds_count", "time_per_output_token_seconds_sum",
                 "waiting", "pages_held", "tokens_per_second", 'requests_total{reason="length"}'):  # fmt: skip
        assert f"\nscaling_{name} " in told


def test_a_key():
    with running(key="sesame") as found:
        assert found.client.get("/v1/models").status_code == 200
        for headers in (
            {"Authorization": ""},
            {"Authorization": "Bearer é".encode()},
            {"Authorization": "Basic sesame"},
        ):
            for path in ("/v1/models", "/metrics", "/figures"):
                assert found.client.get(path, headers=headers).status_code == 401
            assert found.client.get("/health", headers=headers).status_code == 200


def test_a_full_queue():
    with running(slots=1, queue=1, pages=500) as found:
        body = {"prompt": "a", "max_tokens": 1900, "stream": True}
        with found.client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()
            next(lines)
            refused = found.client.post("/v1/completions", json={"prompt": "a", "n": 2})
            assert refused.status_code == 429
            assert "fix: try again later" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        found.until(lambda now: not now["running"])  # the first has gone
        assert plain(found, "a", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [True, False])
def test_clients_that_vanish_free_their_pages(streamed):
    with running(pages=512) as found:
        body = json.dumps({"prompt": "ab", "max_tokens": 2000, "stream": streamed, "n": 2}).encode()
        sockets = [socket.create_connection(("127.0.0.1", found.port)) for _ in range(20)]
        for s in sockets:
            s.sendall(post(body))
        found.until(lambda now: now["running"] + now["waiting"] == 40)
        if streamed:
            assert b"200 OK" in sockets[0].recv(1000)
        for s in sockets:
            s.close()
        now = found.until(lambda now: not now["running"] + now["waiting"])
        assert now["pages_held"] == 0
        assert 'requests_total{reason="cancelled"} 40.0' in found.client.get("/metrics").text


@pytest.mark.slow
def test_a_thousand_malformed_calls_and_the_next_good_one(served):
    wanted = plain(served, "ab", max_tokens=3, **GREEDY)["choices"]
    for data in malformed(1000, 0):
        status = raw(served.port, data)[9:12]
        assert status in (b"", b"200", b"400", b"404", b"408", b"413", b"405", b"431"), (data[:200], status)
    assert plain(served, "ab", max_tokens=3, **GREEDY)["choices"] == wanted
    assert not served.errors


def test_too_long_and_too_slow(monkeypatch):
    monkeypatch.setattr(app, "PATIENCE", 0.3)
    monkeypatch.setattr(server, "PATIENCE", 0.3)
    with running() as found:
        assert found.client.post("/v1/completions", content=b" " * (5 << 20)).status_code == 413
        slow = [socket.create_connection(("127.0.0.1", found.port), timeout=10) for _ in range(3)]
        slow[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")  # a head without an end
        slow[1].sendall(post(b"x" * 9)[:-3])  # a body without one
        assert plain(found, "a", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert slow[0].recv(100) == b""
        assert b"408" in slow[1].recv(100)
        assert slow[2].recv(100) == b""
        for s in slow:
            s.close()


def test_a_second_ctrl_c_ends_what_runs():
    """Each reaches a rank twice: by itself, and as the SIGTERM that the process which started it sends."""
    body = {"prompt": "a", "max_tokens": 20_000, "stream": True}
    with running(pages=6000) as found, found.client.stream("POST", "/v1/completions", json=body) as long:
        lines = long.iter_lines()
        next(lines)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            found.stop(number)
        with pytest.raises(httpx.HTTPError):
            list(lines)


def test_an_engine_that_ends_says_so_to_all():
    broken = {**PARAMS, "norm": torch.full_like(PARAMS["norm"], torch.nan)}
    with running(params=broken) as found:
        answer = found.client.post("/v1/completions", json={"prompt": "ab"})
        assert answer.status_code == 503
        assert "no token can be drawn" in answer.json()["error"]["message"]
    assert "no token can be drawn" in str(found.errors[0])


@pytest.mark.slow
def test_nothing_is_kept_of_requests_that_are_over(served):
    def some(count: int) -> int:
        for i in range(count):
            plain(served, [i % 256, 1, 2], max_tokens=2, stop=["zz"], logprobs=1)
        gc.collect()
        return sum(type(x).__name__ not in ("TimerHandle", "Context") for x in gc.get_objects())  # for seconds

    some(300)  # until the caches are full, of prefixes and of timers
    before = some(50)
    assert some(250) - before < 200
