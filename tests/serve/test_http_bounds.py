"""How long large bodies take to be read or refused: no field makes work that its size does not bound. Those of four
million bytes, the largest that are read, take two to eight times as long."""

import itertools
import json
import time

import pytest

for extra in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(extra, reason="the extras serve and test have it")

from http_server import CONFIG, chat  # noqa: E402

from scaling.models.text import ByteText  # noqa: E402
from scaling.serve.fields import RequestError  # noqa: E402
from scaling.serve.requests import request_seeds  # noqa: E402
from scaling.serve.states import Options  # noqa: E402
from scaling.serve.web import words  # noqa: E402

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
BODIES = {  # what is large: (the field that is refused for it, the rest of the body)
    "a text": ("prompt", {"prompt": "a" * 4 * MILLION}),
    "ids": ("prompt", {"prompt": b"[" + b"1," * MILLION + b"1]"}),
    "numbers that are no ids": ("prompt", {"prompt": b"[" + b"0.5," * 250_000 + b"1]"}),
    "texts": ("prompt", {"prompt": ["a" * 60_000] * 64}),
    "many texts": ("prompt", {"prompt": ["a"] * 200_000}),
    "many lists": ("prompt", {"prompt": b"[" + b"[1]," * 100_000 + b"[1]]"}),
    "messages": ("messages", {"messages": [USER] * 30_000}),
    "a message": ("messages", {"messages": [{"role": "user", "content": "a" * 4 * MILLION}]}),
    "parts": ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 30_000}]}),
    "a role": ("messages[0].role", {"messages": [{"role": "r" * 4 * MILLION, "content": ""}]}),
    "a message's keys": ("messages[0].0", {"messages": [{"role": "user"} | KEYS]}),
    "empty objects": ("prompt", {"prompt": b"[" + b"{}," * 100_000 + b"{}]"}),
    "nulls": ("prompt", {"prompt": b"[" + b'{"a":null},' * 100_000 + b"{}]"}),
    "stop texts": ("stop", {"prompt": "a", "stop": ["b"] * 200_000}),
    "a stop text": ("stop", {"prompt": "a", "stop": "b" * 4 * MILLION}),
    "logit_bias": ("logit_bias", {"prompt": "a", "logit_bias": KEYS}),
    "n": ("n", {"prompt": "a", "n": 10**9}),
    "answers of prompts": ("n", {"prompt": ["a"] * 64, "n": 2}),
    "best_of": ("best_of", {"prompt": "a", "best_of": 10**30}),
    "a number": ("max_tokens", {"prompt": "a", "max_tokens": b"9" * 4000}),
    "keys": ("0", {"prompt": "a"} | KEYS),
    "a key": ("k" * 80, {"prompt": "a", "k" * 4 * MILLION: 1}),
}  # fmt: skip


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
