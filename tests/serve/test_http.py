"""`python -m scaling.serve --port`: what clients get beside what one request gives alone, and what none can break."""

import gc
import itertools
import json
import random
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def parts_of(served, body: dict) -> list[dict]:
    """What a call is answered: of a stream each event, else the one object."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with served.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        kind, lines = response.headers["content-type"], [line for line in response.iter_lines() if line]
    if not body.get("stream"):
        return [json.loads("".join(lines))]
    assert kind.startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(ids) -> str:
    return ByteText().decode(ids)


def asked(served, body: dict) -> list[tuple[str, str, list[float]]]:
    """(text, reason, log-probabilities) of each answer; a stream says no more and no less than the whole does."""
    found: dict[int, tuple] = {}
    *_, last = parts = parts_of(served, body)
    for choice in (choice for part in parts for choice in part["choices"]):
        said = choice.get("delta", choice.get("message", choice)).get("content", choice.get("text", ""))
        notes = choice["logprobs"] or {}
        told = [note["logprob"] for note in notes.get("content", [])] + notes.get("token_logprobs", [])
        text, reason, logprobs = found.get(choice["index"], ("", None, []))
        found[choice["index"]] = text + said, reason or choice["finish_reason"], logprobs + told
    usage, count = last["usage"], sum(len(logprobs) for *_, logprobs in found.values())
    assert (usage["completion_tokens"], usage["total_tokens"] - usage["prompt_tokens"]) == (count, count)
    return [found[index] for index in range(len(found))]


def drawn(count: int, seed: int) -> list[dict]:
    """Random calls, of which some prompts begin alike: ids, texts or chats, streamed or not, some up to a text."""
    chance = random.Random(seed)
    starts, calls = [[chance.randrange(256) for _ in range(12)] for _ in range(3)], []
    for _ in range(count):
        ids = chance.choice(starts)[: chance.randrange(13)] + [
            chance.randrange(256) for _ in range(chance.randint(1, 20))
        ]
        body = {"max_tokens": chance.randint(1, 24), "n": chance.choice([1, 1, 2])}
        body |= chance.choice([GREEDY, {"temperature": 0.8, "seed": 7, "top_k": 9}])
        body |= chance.choice([{}, {"stream": True, "stream_options": {"include_usage": True}}])
        text = "".join(chr(97 + id % 26) for id in ids)
        own = [{"prompt": ids}, {"prompt": [text, ids]}, {"messages": [{"role": "user", "content": text}]}]
        body |= chance.choice(own)
        body |= {"logprobs": True, "top_logprobs": 0} if "messages" in body else {"logprobs": 0}
        (text, _, _), *_ = alone(body)
        stop = text[len(text) // 2 :][:2]
        calls.append(body | ({"stop": [stop, "never"]} if stop and stop.isascii() and chance.random() < 0.6 else {}))
    return calls


def alone(body: dict) -> list[tuple[str, str, list[float]]]:
    """What `asked` should say: by `stream`, without a server, up to the first place where a stop text has come."""
    prompts = [chat(body["messages"])] if "messages" in body else body["prompt"]
    prompts = prompts if isinstance(prompts[0], str | list) else [prompts]
    prompts = [list(p.encode()) if isinstance(p, str) else p for p in prompts for _ in range(body["n"])]
    how, found = Sampling(body["temperature"], body.get("top_k")), []
    steps = [*stream(PARAMS, prompts, CONFIG, body["max_tokens"], how, seed=body.get("seed", 0))]
    for row in range(len(prompts)):
        tokens = [token for step in steps for token in step if token.row == row]
        text, reason, stop = text_of([token.id for token in tokens]), "length", body.get("stop", [""])[0]
        for count in range(1, len(tokens) + 1) if stop else ():
            if stop in (so_far := text_of([token.id for token in tokens[:count]])):
                text, reason, tokens = so_far[: so_far.index(stop)], "stop", tokens[:count]
                break
        found.append((text, reason, pytest.approx([token.logprob for token in tokens], abs=1e-4)))
    return found


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("options", [{}, {"pages": 18}, {"draft": "ngram", "pages": 18}])
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
    body = {"prompt": "ab", "max_tokens": 6, "logprobs": 3, "stream": True, **GREEDY}
    notes = [part["choices"][0]["logprobs"] for part in parts_of(served, body)]
    notes = {name: [one for note in notes for one in note[name]] for name in notes[0]}
    assert notes == plain(served, **body | {"stream": False})["choices"][0]["logprobs"]
    assert [max(top.values()) for top in notes["top_logprobs"]] == pytest.approx(notes["token_logprobs"])  # greedy
    assert all(token in top for token, top in zip(notes["tokens"], notes["top_logprobs"], strict=True))
    assert notes["text_offset"] == [*itertools.accumulate(map(len, notes["tokens"][:-1]), initial=0)]
    many = plain(served, ["ab", "cd", "ab"], max_tokens=3, n=2, seed=5, temperature=1)
    prompts = [list(p) for p in (b"ab", b"ab", b"cd", b"cd", b"ab", b"ab")]
    wanted = serve.generate(PARAMS, prompts, CONFIG, 3, temperature=1, seed=5)
    assert [(c["index"], c["text"]) for c in many["choices"]] == [*enumerate(map(text_of, wanted))]
    assert many["usage"]["prompt_tokens"] == 6
    assert len({plain(served, "ab", max_tokens=8)["choices"][0]["text"] for _ in range(4)}) > 1  # no seed: any
    asks = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    whole = served.client.post("/v1/chat/completions", json=asks).json()
    assert (whole["object"], whole["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
    assert whole["usage"]["total_tokens"] == 256  # as much as fits
    body = asks | {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 2, "stream": True}
    first, *parts = parts_of(served, body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    told = [note for part in parts for note in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [len(note["top_logprobs"]) for note in told] == [2] * 6
    with running(ends=tuple(range(128, 256))) as other:  # ids that end a text
        choice = plain(other, "ab", max_tokens=50, seed=3)["choices"][0]
        assert (choice["finish_reason"], "\ufffd" in choice["text"]) == ("stop", False)


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
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_nothing_is_kept_of_requests_that_are_over(served, count):
    """Neither objects nor memory."""

    def after(count: int) -> tuple[int, int]:
        for i in range(count):
            body = {"prompt": [i % 256, 1, 2], "max_tokens": 2, "stop": ["zz"], "logprobs": 1, "stream": bool(i % 2)}
            assert served.client.post("/v1/completions", json=body).status_code == 200
        gc.collect()
        objects = sum(type(x).__name__ not in ("TimerHandle", "Context") for x in gc.get_objects())  # for seconds
        return objects, int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    after(300)  # until the caches are full, of prefixes and of timers
    (objects, memory), (more, grown) = after(50), after(count)
    assert more - objects < 200
    assert grown - memory < 8 << 20
