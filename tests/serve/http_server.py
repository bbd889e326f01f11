"""A server of a tiny model in threads of this process; random calls, and their answers by it and
without it; and requests that no server should fall over."""

import functools
import json
import random
import signal
import threading
import time
from contextlib import contextmanager
from queue import SimpleQueue
from typing import NamedTuple

import pytest

for extra in ("starlette", "uvicorn", "prometheus_client", "httpx"):  # whoever imports this file is skipped without
    pytest.importorskip(extra, reason="the extras serve and test have it")

import httpx  # noqa: E402

from scaling.configs import Config  # noqa: E402
from scaling.models import transformer  # noqa: E402
from scaling.models.text import ByteText  # noqa: E402
from scaling.serve.generation import stream  # noqa: E402
from scaling.serve.requests import Sampling  # noqa: E402
from scaling.serve.states import Options  # noqa: E402
from scaling.serve.web import server  # noqa: E402
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
def running(
    *, pages=32, page=4, slots=4, queue=100, key=None, cors=(), params=PARAMS, ends=(), policy="chunked", **engine
):
    options = Options(pages, page, slots, budget=16, policy=policy, proposals=3 if "draft" in engine else 0)
    model = Model("tiny", ByteText(), CONFIG.V, ends, chat, options)
    listener, up, errors = server.listen("127.0.0.1", 0), SimpleQueue(), []
    engine |= {"queue": queue, "key": key, "cors": cors, "ready": lambda *told: up.put(told)}

    def serve():
        try:
            server.serve_http(params, model, CONFIG, listener, **engine)
        except ValueError as error:
            errors.append(error)

    thread, port = threading.Thread(target=serve), listener.getsockname()[1]
    thread.start()
    address, stop = up.get(timeout=30)
    assert address == f"http://127.0.0.1:{port}"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=address, timeout=60, headers=headers) as client:
            yield Running(client, port, stop, errors)
    finally:
        stop(signal.SIGTERM)
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
