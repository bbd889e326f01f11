"""`python -m scaling.serve --port`: the openai package as its client, and ranks of a mesh behind it."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from scaling import serve
from scaling.models import hf, transformer

for extra in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(extra, reason="the extras serve and test have it")

import httpx  # noqa: E402
from http_server import CONFIG, running  # noqa: E402

GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def served():
    with running() as found:
        yield found


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
            texts = list(
                pool.map(lambda _: client.chat.completions.create(**ask).choices[0].message.content, range(64))
            )
        assert set(texts) == {whole.message.content}


@pytest.mark.slow
def test_the_command_on_a_mesh_finishes_what_runs_at_ctrl_c(tmp_path):
    config = CONFIG.with_(V=258)
    params = transformer.init(config, 3)
    hf.save(tmp_path, config, params)
    command = [
        sys.executable,
        "-m",
        "scaling.serve",
        "--model",
        str(tmp_path),
        "--mesh",
        "Y=3",
        "--port",
        "0",
        "--pages",
        "600",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ, start_new_session=True
    ) as process:
        address = process.stdout.readline().split()[1]
        wanted = serve.generate(params, [[5, 6, 7]], config, 6)[0]
        answer = httpx.post(
            f"{address}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 6, **GREEDY}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == len(wanted)
        threading.Timer(0.2, lambda: os.killpg(process.pid, signal.SIGINT)).start()  # as a terminal does
        began = time.monotonic()
        long = httpx.post(f"{address}/v1/completions", json={"prompt": [5], "max_tokens": 200}, timeout=100)
        assert long.json()["usage"]["completion_tokens"] == 200
        assert time.monotonic() - began > 0.2
        assert process.wait(60) == 0
