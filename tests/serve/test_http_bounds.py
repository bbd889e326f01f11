"""What no call does: take longer to be read or refused than its size allows, and get past the key of a server, which is
refused if anybody has it. Bodies of four million bytes, the largest that are read, take two to eight times as long."""

import http.client
import itertools
import json
import time

import pytest
from http_server import CONFIG, chat, running
from refused import named

from scaling import __main__
from scaling.models.text import ByteText
from scaling.serve import scheduler
from scaling.serve.requests import Request, RequestError, request_seeds
from scaling.serve.states import Arrive, Options
from scaling.serve.web import app, desk, words

SHORT = words.Model("tiny", ByteText(), CONFIG.V, (), chat, Options(32, 4))
LONG = SHORT._replace(options=Options(1 << 20, 4))
MILLION = 500_000
DEEP = "[" * 700 + "]" * 700
FIELDS = sorted({*words.PLAIN, *words.CHAT, *words.NEUTRAL} - {"prompt", "messages"})


def body(**fields) -> bytes:
    """The JSON of these fields, of which those of type bytes are JSON already."""
    return b"{" + b", ".join(
        json.dumps(name).encode() + b": " + (value if isinstance(value, bytes) else json.dumps(value).encode())
        for name, value in fields.items()
    ) + b"}"  # fmt: skip


KEYS = dict.fromkeys(map(str, range(50_000)), 1)
USER = {"role": "user", "content": "a"}
# what is large: (the field that is refused for it, the rest of the body)
BODIES = named(
    """
what is large            the field that is refused for it, the rest of the body
a text                   ("prompt", {"prompt": "a" * 4 * MILLION})
ids                      ("prompt", {"prompt": b"[" + b"1," * MILLION + b"1]"})
numbers that are no ids  ("prompt", {"prompt": b"[" + b"0.5," * 250_000 + b"1]"})
texts                    ("prompt", {"prompt": ["a" * 60_000] * 64})
many texts               ("prompt", {"prompt": ["a"] * 200_000})
many lists               ("prompt", {"prompt": b"[" + b"[1]," * 100_000 + b"[1]]"})
messages                 ("messages", {"messages": [USER] * 30_000})
a message                ("messages", {"messages": [{"role": "user", "content": "a" * 4 * MILLION}]})
parts
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]})
a role                   ("messages[0].role", {"messages": [{"role": "r" * 4 * MILLION, "content": ""}]})
a message's keys         ("messages[0].0", {"messages": [{"role": "user"} | KEYS]})
empty objects            ("prompt", {"prompt": b"[" + b"{}," * 100_000 + b"{}]"})
nulls                    ("prompt", {"prompt": b"[" + b'{"a":null},' * 100_000 + b"{}]"})
stop texts               ("stop", {"prompt": "a", "stop": ["b"] * 200_000})
a stop text              ("stop", {"prompt": "a", "stop": "b" * 4 * MILLION})
logit_bias               ("logit_bias", {"prompt": "a", "logit_bias": KEYS})
n                        ("n", {"prompt": "a", "n": 10**9})
answers of prompts       ("n", {"prompt": ["a"] * 64, "n": 2})
best_of                  ("best_of", {"prompt": "a", "best_of": 10**30})
a number                 ("max_tokens", {"prompt": "a", "max_tokens": b"9" * 4000})
keys                     ("0", {"prompt": "a"} | KEYS)
a key                    ("k" * 80, {"prompt": "a", "k" * 4 * MILLION: 1})
""",
    globals(),
)


def refused(data: bytes, chat: bool, model=SHORT) -> RequestError:
    before = time.process_time()
    with pytest.raises(RequestError) as found:
        words.read_body(data, model, chat, itertools.count())
    assert time.process_time() - before < 0.7
    assert len(str(found.value)) < 1500
    return found.value


@pytest.mark.parametrize("large", BODIES)
def test_the_largest_bodies_are_refused_in_bounded_time(large):
    param, fields = BODIES[large]
    assert refused(body(**fields), "messages" in fields).param == param


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_with_a_long_text_and_a_deep_list(field):
    for value in (b'"' + b"x" * 100_000 + b'"', b'["' + b"x" * 100_000 + b'"]', DEEP.encode()):
        plain = {"prompt": "a"} if field in {*words.PLAIN, *words.NEUTRAL} else {"messages": [USER]}
        assert refused(body(**plain, **{field: value}), "messages" in plain).param == field


class Words(ByteText):
    """Four characters are a token, the longest has fifty; `work`: how many characters were encoded."""

    longest, work = 50, 0

    def encode(self, text, special=False):
        self.work += len(text)
        return [1] * (-(-len(text) // 4))


def test_a_text_that_is_too_long_is_refused_by_its_beginning():
    """Of a text that may fit by its characters, since a token may have fifty."""
    for message in (False, True):
        model = SHORT._replace(tokenizer=Words(), options=Options(250, 4))
        text = {"messages": [USER | {"content": "a" * 49_000}]} if message else {"prompt": "a" * 49_000}
        error = refused(body(**text), message, model)
        assert (error.code, model.tokenizer.work) == ("context_length_exceeded", 8 * 999)
        fitting = {"messages": [USER | {"content": "a" * 3900}]} if message else {"prompt": "a" * 3900}
        words.read_body(body(**fitting), model, message, itertools.count())


def test_a_long_context_is_read_in_time_by_its_length():
    """A prompt of many ids, and many answers of one: what is said of each token is said once."""
    before = time.process_time()
    call = words.read_body(body(prompt=b"[" + b"1," * 200_000 + b"1]"), LONG, False, itertools.count())
    assert len(call.requests[0].prompt) == 200_001
    call = words.read_body(body(prompt="a" * 60_000, n=64, seed=3), LONG, False, itertools.count())
    assert time.process_time() - before < 3
    assert len({request.draw.seed for request in call.requests}) == 64
    assert [r.draw.seed for r in call.requests[:2]] == request_seeds([[97] * 60_000] * 2, 3)


BODY = json.dumps({"prompt": "a", "max_tokens": 1})
TARGETS = [  # of calls that need the key
    "/v1/completions", "/v1/models", "/metrics", "/figures", "/x", "//", "//health", "/health/", "/health//",
    "/health;", "/./health", "/health/..", "/health/../v1/models", "/v1/models/../../health", "/HEALTH", "x/health",
    "/health%2f..%2fv1/models", "/%2fhealth", "/health%00", "/health%20", "/health%3f", "/v1%2fmodels", "/v1/models/",
    "/v1/models?/health", "/v1/models#/health", "/v1/models%3f/health", "http://x/health", "http://x/", "*",
    "http://x/v1/models",
]  # fmt: skip
HEADS = [
    {}, {"Host": "x/health?"}, {"Host": "x/health#"}, {"Host": "/health"}, {"Host": "["}, {"Host": ""},
    {"X-Forwarded-Prefix": "/health", "X-Forwarded-Host": "x/health?"}, {"X-Original-URL": "/health"},
    {"X-Forwarded-Path": "/health", "X-Forwarded-For": "127.0.0.1"}, {"X-HTTP-Method-Override": "OPTIONS"},
]  # fmt: skip
WRONG = [
    "",
    "Bearer",
    "Bearer ",
    "Bearer  sesame",
    "Bearer sesam",
    "Bearer sesamee",
    "Basic sesame",
    "sesame",
    "Bearer é",
]


@pytest.fixture(scope="module")
def locked():
    with running(key="sesame") as found:
        yield found


def status_of(port: int, method: str, target: str, headers: dict) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest(method, target, skip_host="Host" in headers)
        for name, value in ({"Content-Length": str(len(BODY))} | headers).items():
            connection.putheader(name, value.encode())
        connection.endheaders(BODY.encode())
        return connection.getresponse().status
    finally:
        connection.close()


def test_no_form_of_a_call_gets_past_the_key(locked):
    """GHSA-86qp-5c8j-p5mr: starlette below 1.0.1 builds `request.url.path` from the Host header."""
    calls = [*itertools.product(["POST", "GET"], TARGETS, HEADS[:1]), *itertools.product(["POST"], TARGETS[:1], HEADS)]
    calls += itertools.product(["GET", "HEAD", "OPTIONS", "PUT", "FOO"], TARGETS[:2], HEADS[:3])
    calls += itertools.product(["POST"], TARGETS[:1], [{"Authorization": key} for key in WRONG])
    for method, target, headers in calls:
        assert status_of(locked.port, method, target, headers) in (400, 401), (method, target, headers)
    for headers, target in itertools.product(HEADS, ("/health", "/", "/health?x=/v1/models")):
        assert status_of(locked.port, "GET", target, headers) in (200, 400), (target, headers)
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} sesame", "Host": "x/health?"}
        assert status_of(locked.port, "POST", "/v1/completions", headers) == 200
    refused = locked.client.get("/v1/models", headers={"Authorization": ""}).json()["error"]
    assert "fix: send the header Authorization: Bearer KEY" in refused["message"]
    assert (refused["type"], refused["code"]) == ("invalid_request_error", "invalid_api_key")


def test_a_key_comes_from_an_option_a_file_or_the_environment(tmp_path, monkeypatch, capsys):
    (file := tmp_path / "key").write_text("of-a-file\n")
    assert app.read_key(None, None) is None
    monkeypatch.setenv("SCALING_KEY", "of-the-environment")
    found = [app.read_key(*given) for given in (("given", None), (None, file), (None, None))]
    assert found == ["given", "of-a-file", "of-the-environment"]
    monkeypatch.setenv("SCALING_KEY", "")
    file.write_text("\n")
    for given in (("", None), (None, file), (None, None)):
        with pytest.raises(ValueError, match="the key is empty"):
            app.read_key(*given)
    for key in ("a b", "é", "a\n"):
        with pytest.raises(ValueError, match="no client can send this key"):
            app.read_key(key, None)
    with pytest.raises(SystemExit):
        __main__.main(["serve", "--model", "x", "--port", "0", "--key", "a", "--key-file", str(file)])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize("origin", ["https://a.org", "*"])
def test_pages_of_other_origins(origin):
    """A browser asks without the key what a page may do; then the page sends the key, and reads refusals as well."""
    with running(key="sesame", cors=[origin]) as found:
        asks = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
        asks |= {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os", "Authorization": ""}
        allowed = found.client.options("/v1/chat/completions", headers=asks)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, origin)
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        for key, status in (("Bearer sesame", 200), ("", 401)):
            answer = found.client.get("/v1/models", headers={"Origin": "https://a.org", "Authorization": key})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin)
        other = found.client.get("/v1/models", headers={"Origin": "https://b.org"}).headers
        assert other.get("access-control-allow-origin") == (None if origin != "*" else "*")
    for wrong in ("a.org", "https://a.org/", "https://a.org/b", "", "https://u@a.org"):
        with pytest.raises(ValueError, match="is not an origin"):
            app.check_origin(wrong)


def test_the_figures_count_the_pages_of_layers_with_a_window():
    state, _ = scheduler.step(scheduler.initial(Options(32, 4, window=4)), [Arrive(Request(1, (1,) * 9, 2))])
    now = desk.Figures().now(state)
    assert now["pages"] == 32 + state.options.window_pages
    assert now["pages_held"] == sum(len(live) for live in (state.live[1].pages, state.live[1].window_pages))
