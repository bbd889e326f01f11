"""`python -m scaling.serve --port`: what clients get beside what one request gives alone, and what none can break; a
browser as a client."""

import codecs
import gc
import itertools
import json
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from http_server import CONFIG, GREEDY, PARAMS, alone, asked, chat, drawn, httpx, malformed, post, running
from refused import read_table

from scaling import serve
from scaling.models.text import ByteText
from scaling.serve import engine
from scaling.serve.web import app, server


@pytest.fixture(scope="module")
def served():
    """The tiny model's server, for all tests of this file."""
    with running() as found:
        yield found


@pytest.mark.parametrize("count", [16, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.slow
def test_each_of_many_at_once_gets_what_it_gets_alone(count):
    """Batched, preempted, prefixed and speculated."""
    calls = drawn(count, count)
    with running(draft="ngram", pages=18) as found, ThreadPoolExecutor(16) as pool:
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
    pieces = [t.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1") for t in notes["tokens"]]
    assert b"".join(pieces).decode(errors="replace") == served.plain(**body)["choices"][0]["text"]
    whole = map(codecs.getincrementaldecoder("utf-8")(errors="replace").decode, pieces[:-1])
    assert notes["text_offset"] == [*itertools.accumulate(map(len, whole), initial=0)]
    assert served.plain(["ab", "cd", "ab"], n=2)["usage"]["prompt_tokens"] == 6
    assert len({served.plain("ab", max_tokens=8)["choices"][0]["text"] for _ in range(4)}) > 1  # no seed: any
    asks = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    whole = served.call(**asks).json()
    assert (whole["object"], whole["choices"][0]["message"]["role"]) == ("chat.completion", "assistant")
    assert whole["usage"]["total_tokens"] == 128  # as much as fits
    body = asks | {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 2, "stream": True}
    first, *parts = served.parts(**body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    told = [note for part in parts for note in (part["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [len(note["top_logprobs"]) for note in told] == [2] * 6
    with running(ends=tuple(range(128, 256))) as other:  # ids that end a text
        choice = other.plain("ab", max_tokens=50, seed=3)["choices"][0]
        assert (choice["finish_reason"], "\ufffd" in choice["text"]) == ("stop", False)


TOO_LONG = ("127 tokens are left", "has 128 tokens", "has 128 characters")
# beside what `python -m scaling.serve` refuses in a file
TABLE = """
words of the reason              field                   body
no prompt                        prompt                  {"prompt": None}
prompt is empty                  prompt                  {"prompt": ""}
neither a text nor               prompt                  {"prompt": 3}
token 256                        prompt                  {"prompt": [256]}
has 128 tokens                   prompt                  {"prompt": [1] * 128}
has 128 characters               prompt                  {"prompt": "a" * 128}
n=65                             n                       {"n": 65}
max_tokens=0                     max_tokens              {"max_tokens": 0}
127 tokens are left              max_tokens              {"max_tokens": 999}
top_p is 0                       top_p                   {"top_p": 0}
top_k=-2                         top_k                   {"top_k": -2}
field 'zz'                       zz                      {"zz": 1}
fix: give 'tiny'                 model                   {"model": "gpt-4"}
logprobs=6                       logprobs                {"logprobs": 6}
stream='yes'                     stream                  {"stream": "yes"}
stream_options is                stream_options          {"stream_options": {"a": True}}
seed=1.5                         seed                    {"seed": 1.5}
frequency_penalty=0.5            frequency_penalty       {"frequency_penalty": 0.5}
presence_penalty=False           presence_penalty        {"presence_penalty": False}
best_of                          best_of                 {"best_of": 2}
stop is not                      stop                    {"stop": [""]}
messages is not                  messages                {"messages": []}
the first message is the user's  messages                {"role": "assistant"}
its role is 'tool'               messages[0].role        {"role": "tool"}
has no role                      messages[0].role        {"role": None}
its content                      messages[0].content     {"content": None}
'tool_calls' is not              messages[0].tool_calls  {"tool_calls": [{}]}
'zz' is                          messages[0].zz          {"zz": []}
does not write the name          messages[0].name        {"name": "Ann"}
logprobs: true                   top_logprobs            {"messages": [USER], "top_logprobs": 2}
max_tokens=9 is not              max_tokens              {"messages": [USER],"max_tokens": 9,"max_completion_tokens": 2}
"""
REFUSED = read_table(TABLE, {"USER": {"role": "user", "content": "a"}}, ("words of the reason", "field"))


@pytest.mark.parametrize(("words", "param", "body"), REFUSED, ids=[words for words, *_ in REFUSED])
def test_what_is_wrong_is_refused_with_the_reason(served, words, param, body):
    if param.startswith("messages") and "messages" not in body:
        body = {"messages": [{"role": "user", "content": "a"} | body]}
    answer = served.call(**{"prompt": "a"} | body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if "model" in body else 400)
    assert words in error["message"]
    code = "model_not_found" if param == "model" else "context_length_exceeded" if words in TOO_LONG else None
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_what_changes_nothing_is_accepted(served):
    """A null is as a key that is not given, in every object; and other fields have the values that they start with."""
    message = {"role": "user", "content": "hi", "name": None, "tool_calls": None}
    plain = served.call(messages=[message], max_tokens=6, **GREEDY).json()["choices"][0]
    neutral = {"tool_choice": "auto", "tools": [], "parallel_tool_calls": False, "repetition_penalty": 1.0, "top_k": -1}
    neutral |= {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    neutral |= {"stop": None, "stream_options": {"include_usage": None}, "top_p": 1, "seed": -(2**63), "user": "me"}
    assert served.call(messages=[message], max_tokens=6, **GREEDY, **neutral).json()["choices"][0] == plain
    answer = plain["message"] | {"refusal": None, "annotations": [], "tool_calls": [], "function_call": None}
    assert served.call(messages=[message, answer, message], max_tokens=2).status_code == 200  # as clients send it back
    developer = [{"role": role, "content": "b"} for role in ("developer", "system")]
    texts = [served.call(messages=[one, message], max_tokens=6, **GREEDY).json()["choices"][0] for one in developer]
    assert texts[0] == texts[1] != plain
    assert served.plain("a", best_of=2, n=2, **GREEDY, suffix="")["choices"][1]["index"] == 1


def test_addresses():
    with running(key="sesame") as found:
        assert found.client.get("/health").json() == {"status": "ok"}
        assert [m["id"] for m in found.client.get("/v1/models").json()["data"]] == ["tiny"]
        assert found.client.get("/v1/models/tiny").json()["id"] == "tiny"
        codes = {"/v1/models/x": (404, "model_not_found"), "/x": (404, "unknown_url"), "/v1/completions": (405, None)}
        for path, wanted in codes.items():
            answer = found.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == wanted
        page = found.client.get("/")
        assert "http" not in page.text.replace("<meta http-equiv", "")  # nothing comes from outside
        assert "connect-src 'self'" in page.headers["content-security-policy"]
        found.plain("ab", max_tokens=2)
        told = found.client.get("/metrics").text
        for name in ("generated_tokens_total", "time_to_first_token_seconds_count", "time_per_output_token_seconds_sum",
                     "waiting", "pages_held", "tokens_per_second", 'requests_total{reason="length"}'):  # fmt: skip
            assert f"\nscaling_{name} " in told


def test_a_full_queue_clients_that_vanish_and_a_second_ctrl_c():
    """The second ends what runs. Each reaches a rank twice: by itself, and as the SIGTERM that the process which
    started it sends. Clients that vanish free their pages and places, streamed to, or served and waiting."""
    with running(slots=1, queue=1, pages=6000) as found:
        with found.streamed(max_tokens=1900) as first:
            lines = first.iter_lines()
            next(lines)
            refused = found.call("a", n=2)
            assert refused.status_code == 429
            assert "fix: try again later" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        found.until(lambda now: not now["running"])  # the first has gone
        with socket.create_connection(("127.0.0.1", found.port)) as other:
            other.sendall(post(json.dumps({"prompt": "a", "max_tokens": 2000, "n": 2}).encode()))
            found.until(lambda now: now["running"] == now["waiting"] == 1)
        assert found.until(lambda now: not now["running"] + now["waiting"])["pages_held"] == 0
        assert 'requests_total{reason="cancelled"} 3.0' in found.client.get("/metrics").text
        assert found.plain("a", max_tokens=2)["usage"]["completion_tokens"] == 2
        with found.streamed(max_tokens=20_000) as long:
            lines = long.iter_lines()
            next(lines)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                found.stop(number)
            with pytest.raises(httpx.HTTPError):
                list(lines)


@pytest.mark.slow
def test_malformed_calls_and_the_next_good_one(served):
    wanted = served.plain("ab", max_tokens=3, **GREEDY)["choices"]
    for data in malformed(300, 0):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as s, suppress(OSError):
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            status = s.recv(1 << 16)[9:12]
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


def test_an_engine_that_ends_says_so_to_all(monkeypatch):
    monkeypatch.setattr(engine, "sample", lambda *_: int("broken"))
    with running() as found:
        answer = found.call("ab")
        assert answer.status_code == 503
        assert "invalid literal" in answer.json()["error"]["message"]
    assert "invalid literal" in str(found.errors[0])


def test_an_answer_whose_logits_are_not_finite_ends_alone():
    """As an error of OpenAI's form, in a stream too; a call that runs beside it and later calls are as ever."""
    broken = PARAMS | {"embed": PARAMS["embed"].index_fill(0, torch.tensor([7]), torch.inf)}
    body = {"prompt": "abc", "max_tokens": 60, **GREEDY}
    with running(params=broken) as found, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(found.plain, **body)
        for more in ({}, {"n": 2}, {"stream": True}, {"echo": True, "logprobs": 2}):
            answer = found.call([1, 2, 7], **more)
            data = answer.text.partition("data: {")[2].splitlines()[0] if more.get("stream") else answer.text[1:]
            error = json.loads("{" + data)["error"]
            assert (answer.status_code, error["type"]) == (200 if more.get("stream") else 500, "server_error")
            assert error["message"].startswith("failed: logits without a finite maximum")
        assert beside.result()["choices"] == found.plain(**body)["choices"]
        assert found.until(lambda now: not now["running"])["pages_held"] == 0
    assert not found.errors


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

    gc.freeze()  # as in conftest.py: what other tests have left is neither counted nor searched again and again
    after(50)  # until the caches are full, of prefixes and of timers
    rounds = [after(count // 2) for _ in range(4)]  # what is kept grows in each; what lives for seconds does not
    assert min(more - objects for (objects, _), (more, _) in pairwise(rounds)) < 100
    assert rounds[-1][1] - rounds[0][1] < 8 << 20


MARKDOWN = {  # what a model writes: what the page shows
    "# A\n\n**b** and *i*, 2*3*4": "<h2>A</h2><p><b>b</b> and <i>i</i>, 2*3*4</p>",
    "such:\n- `x*y*`\n- two\n  lines": "<p>such:</p><ul><li><code>x*y*</code></li><li>two\nlines</li></ul>",
    "2. b\n\n3. c": '<ol start="2"><li>b</li></ol><ol start="3"><li>c</li></ol>',
    "```python\nx < 1\n\n# y\n```": "<pre>x &#60; 1\n\n# y\n</pre>",
    "```\nnot *ended*": "<pre>not *ended*</pre>",
    "| a | b |\n|--|:-:|\n| 1 | 2 |": "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>",
    '<img src=x onerror="f()"> &amp;': "<p>&#60;img src=x onerror=&#34;f()&#34;&#62; &#38;amp;</p>",
    "[l](javascript:f()) ![p](http://e.org/p)": "<p>[l](javascript:f()) ![p](http://e.org/p)</p>",
    "a\x000\x00 `c`": "<p>a0 <code>c</code></p>",
}


def test_the_page_shows_markdown_and_no_tag_of_the_models_own():
    node = shutil.which("node") or pytest.skip("no node")
    page = (Path(serve.__file__).parent / "web" / "page.html").read_text()
    function = page[page.index("function html(") : page.index("async function look()")]
    program = f"{function}\nconsole.log(JSON.stringify({json.dumps([*MARKDOWN])}.map(html)))"
    shown = subprocess.run([node, "-e", program], capture_output=True, text=True, check=True).stdout
    assert dict(zip(MARKDOWN, json.loads(shown), strict=True)) == MARKDOWN


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
        expect(page.locator("#pages")).to_have_text("32")
        page.fill("#temperature", "0")
        page.fill("#most", "5")
        page.fill("#text", "hi <b>")
        page.press("#text", "Enter")
        expect(page.locator("#send")).to_have_text("Send")
        said = chat([{"role": "user", "content": "hi <b>"}])
        wanted = ByteText().decode(serve.generate(PARAMS, [list(said.encode())], CONFIG, 5)[0])
        rendered = "text => Object.assign(document.createElement('div'), {innerHTML: html(text)}).innerHTML"
        until = time.monotonic() + 10
        while page.locator(".assistant").inner_html() != page.evaluate(rendered, wanted):
            assert time.monotonic() < until, page.locator(".assistant").text_content()
        page.fill("#text", "a" * 300)
        page.click("#send")
        expect(page.locator(".error")).to_contain_text("maximum context length is 128 tokens")
        assert reached == {f"127.0.0.1:{found.port}"}
        assert not wrong
