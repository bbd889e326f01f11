"""The gate: the key that clients have to send, and the pages that may read answers."""

import hmac
import os
import re
from collections.abc import Callable
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/", "/health")  # need no key
VARIABLE = "SCALING_KEY"


def read_key(given: str | None, file: "str | Path | None") -> str | None:
    """Return the key that clients have to send: as given, or from the file, or from the environment; None without one.

    Raises:
        ValueError: No client could send the key, or every client could.
    """
    if given is not None:
        return check_key("--key", given)
    if file is not None:
        return check_key(f"--key-file {file}", Path(file).read_text(errors="replace").rstrip("\r\n"))
    if (found := os.environ.get(VARIABLE)) is not None:
        return check_key(VARIABLE, found)
    return None


def check_key(source: str, key: str) -> str:
    """Return the key. ValueError if it is empty, which any client could send, or does not fit into a header."""
    if not key:
        raise ValueError(f"{source}: the key is empty, so that anybody has it\n  fix: give a key, or leave it out")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{source}: no client can send this key\n  fix: use letters, digits and signs of ASCII alone")
    return key


def check_origin(origin: str) -> str:
    """Return an origin as browsers send it, or "*". ValueError for anything else, which no page would match."""
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
        raise ValueError(f"{origin!r:.80} is not an origin\n  fix: give one such as https://example.org, or *")
    return origin


class KeyGate:
    """An ASGI application in front of another one: calls without the key are refused before anything else is read.

    `scope["path"]`, the path by which routes are chosen, decides which calls need no key. `request.url` would be wrong:
    it is put together from the Host header, which the client writes.
    """

    def __init__(self, app: ASGIApp, key: str, refusal: Callable[[], Response]):
        self.app, self.refusal = app, refusal
        self.key = check_key("key", key).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a call in, or answer it with the refusal."""
        allowed = scope["type"] == "lifespan" or scope["path"] in OPEN or self._has_key(scope)
        await (self.app if allowed else self.refusal())(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(key, self.key) and scheme.lower() == b"bearer"
