"""The key of a server: no form of a call gets past it, and a key that anybody has is refused."""

import http.client
import itertools
import json

import pytest

for extra in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(extra, reason="the extras serve and test have it")

from http_server import running  # noqa: E402

from scaling import __main__  # noqa: E402
from scaling.serve.web import app  # noqa: E402

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
