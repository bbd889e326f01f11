"""`python -m scaling.serve --port`: the openai package and a browser as clients, a mesh's ranks behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from scaling import serve
from scaling.models import hf, transformer
from scaling.models.text import ByteText, write_bytes

for extra in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(extra, reason="the extras serve and test have it")

import httpx  # noqa: E402
from http_server import CONFIG, PARAMS, chat, running  # noqa: E402

GREEDY = {"temperature": 0}


@pytest.mark.slow
def test_the_openai_package(served):
    openai = pytest.importorskip("openai", reason="the extra test has it")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    with client:
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
        with ThreadPoolExecutor(64) as pool:
            answers = pool.map(lambda _: client.chat.completions.create(**ask).choices[0].message.content, range(64))
            assert {*answers} == {whole.message.content}
            endless = ask | {"max_tokens": 200, "stream": True}
            for vanishing in pool.map(lambda _: client.chat.completions.create(**endless), range(20)):
                vanishing.close()
        assert served.until(lambda now: not now["running"] + now["waiting"])["pages_held"] == 0
        assert client.chat.completions.create(**ask).choices[0].message.content == whole.message.content


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_the_command_on_a_mesh_finishes_what_runs_at_ctrl_c(tmp_path, torchrun):
    config = CONFIG.with_(V=258)
    params = transformer.init(config, 3)
    hf.save(tmp_path, config, params)
    write_bytes(tmp_path)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"] if torchrun else []
    options = f"-m scaling.serve --model {tmp_path} --mesh Y=3 --port 0 --pages 600".split()
    command, out = [sys.executable, *start, *options], subprocess.PIPE
    error = subprocess.DEVNULL if torchrun else None  # its traceback of the signal
    with subprocess.Popen(command, stdout=out, stderr=error, text=True, start_new_session=True) as process:
        url = process.stdout.readline().split()[1] + "/v1/completions"
        text = ByteText().decode(serve.generate(params, [[5, 6, 7]], config, 15)[0])
        for stop in ([], [text[-4:-1]]):  # a text that all ranks have to see
            asked = {"prompt": [5, 6, 7], "max_tokens": 15, "stop": stop, **GREEDY}
            answer = httpx.post(url, json=asked, timeout=60).json()["choices"][0]
            assert answer["text"] == (text[: text.index(stop[0])] if stop else text)
            assert answer["finish_reason"] == ("stop" if stop else "length")
        body = {"prompt": [5], "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", url, json=body, timeout=100) as long:
            lines = long.iter_lines()
            next(lines)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            *_, usage, done = (line for line in lines if line)
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 100
        assert done == "data: [DONE]"
        assert process.wait(60) == (1 if torchrun else 0)  # torchrun's own code for a signal


@pytest.mark.slow
@pytest.mark.parametrize("template", [chat, None], ids=["chat", "plain"])
def test_the_page_in_a_browser(template):
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    browser = shutil.which("chromium") or pytest.skip("no chromium")
    with running(template=template) as found, playwright.sync_playwright() as play:
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
        said = chat([{"role": "user", "content": "hi <b>"}]) if template else "hi <b>"
        wanted = ByteText().decode(serve.generate(PARAMS, [list(said.encode())], CONFIG, 5)[0])
        until = time.monotonic() + 10
        while page.locator(".assistant").text_content() != wanted:
            assert time.monotonic() < until, page.locator(".assistant").text_content()
        page.fill("#text", "a" * 300)
        page.click("#send")
        expect(page.locator(".error")).to_contain_text("only 256 fit")
        assert reached == {f"127.0.0.1:{found.port}"}
        assert not wrong
