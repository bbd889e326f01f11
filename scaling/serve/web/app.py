"""The application, of Starlette, which answers each address, and which a server runs next to the engine's loop.

Every call of a client is answered with a status and a reason, and ends nothing but itself.
"""

import asyncio
import hmac
import itertools
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from scaling.serve.web.desk import AnswerPiece, Ask, Desk
from scaling.serve.web.words import NO_MODEL, AnswerWriter, ClientCall, Model, read_body

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


BODY = 4 << 20  # the most bytes of a body
PATIENCE = 30.0  # seconds for a body to arrive
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
PAGE = Path(__file__).with_name("page.html")
ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Refused(HTTPException):
    """A call that is answered with this status and reason; `param` and `code` as in OpenAI's errors."""

    def __init__(self, status: int, reason: str, param: str | None = None, code: str | None = None):
        super().__init__(status, reason)
        self.param, self.code = param, code

    def body(self) -> dict:
        """Return the error as OpenAI's clients read it."""
        kind = "rate_limit_error" if self.status_code == 429 else "invalid_request_error"
        kind = "server_error" if self.status_code >= 500 else kind
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def application(
    desk: Desk, model: Model, *, queue: int = 64, key: str | None = None, cors: Sequence[str] = ()
) -> Starlette:
    """Return the application that answers the calls of one server.

    Args:
        desk: The desk that takes the requests.
        model: The served model.
        queue: How many requests may wait in addition to those in the slots.
        key: The key that a client has to send, as `Authorization: Bearer KEY`; None if none is needed.
        cors: The origins whose pages a browser may let read the answers; "*" is all of them.
    """
    calls = _Calls(desk, model, queue)

    async def refused(request: Request, error: Any) -> Response:
        if not isinstance(error, Refused):
            reason = f"{request.method} {request.scope['path']:.80} is not served"
            error = Refused(error.status_code, reason, None, "unknown_url" if error.status_code == 404 else None)
        return _refusal(desk, error)

    async def nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    def without_key() -> Response:
        reason = "the key is missing or wrong\n  fix: send the header Authorization: Bearer KEY"
        return _refusal(desk, Refused(401, reason, None, "invalid_api_key"))

    routes = [
        Route("/", calls.page), Route("/health", calls.health), Route("/metrics", calls.metrics),
        Route("/figures", calls.figures), Route("/v1/models", calls.models),
        Route("/v1/models/{name:path}", calls.models),
        Route("/v1/completions", partial(calls.complete, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", partial(calls.complete, chat=True), methods=["POST"]),
    ]  # fmt: skip
    doors = [] if key is None else [Middleware(KeyGate, key, without_key)]
    if cors:  # before the key, which browsers do not send with a preflight request
        methods, headers = ["GET", "POST"], ["*"]
        doors = [Middleware(CORSMiddleware, [*cors], methods, headers, expose_headers=["Retry-After"]), *doors]
    answers = Starlette(
        routes=routes, middleware=doors, exception_handlers={HTTPException: refused, ClientDisconnect: nobody}
    )
    answers.router.redirect_slashes = False  # to an address that the client's Host header would choose
    return answers


def _refusal(desk: Desk, error: Refused) -> Response:
    desk.figures.refusals.labels(str(error.status_code)).inc()
    return _json(error.body(), error.status_code, HEADERS.get(error.status_code))


def _check_running(desk: Desk) -> None:
    if desk.failed:
        raise Refused(503, f"the engine has ended: {desk.failed}")


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


class _Calls:
    """The handlers of the addresses."""

    def __init__(self, desk: Desk, model: Model, queue: int):
        self.desk, self.model = desk, model
        self.most = model.options.slots + queue
        self.ids = itertools.count()

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": ALONE})

    async def health(self, request: Request) -> Response:
        _check_running(self.desk)
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.desk.figures.text(self.desk.turns.state), media_type="text/plain; version=0.0.4")

    async def figures(self, request: Request) -> Response:
        return _json(self.desk.figures.now(self.desk.turns.state))

    async def models(self, request: Request) -> Response:
        name, created = request.path_params.get("name"), 0
        own = {"id": self.model.name, "object": "model", "created": created, "owned_by": "scaling"}
        own |= {"max_model_len": self.model.options.length, "chat": self.model.chat is not None}
        own["max_position_embeddings"] = self.model.longest
        if name is not None and name != self.model.name:
            reason = f"model {name!r:.80} is not served here\n  fix: give {self.model.name!r}"
            raise Refused(404, reason, "model", NO_MODEL)
        return _json({"object": "list", "data": [own]} if name is None else own)

    async def complete(self, request: Request, chat: bool) -> Response:
        body = await _body(request)
        try:
            call = await asyncio.to_thread(read_body, body, self.model, chat, self.ids)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:  # a RequestError is a ValueError
            param, code = getattr(error, "param", None), getattr(error, "code", None)
            raise Refused(404 if code == NO_MODEL else 400, str(error), param, code) from None
        _check_running(self.desk)
        if (held := len(self.desk.answers)) + len(call.requests) > self.most:
            text = f"{held} requests are running, of at most {self.most}"
            reason = f"{text}\n  fix: try again later, or ask for fewer answers at once"
            raise Refused(429, reason, None, "rate_limit_exceeded")
        answers, writer = _Answers(self.desk, call), AnswerWriter(call, self.model)
        if call.stream:
            return _Stream(answers, writer)
        whole, gone = asyncio.ensure_future(answers.whole()), asyncio.ensure_future(_until_gone(request.receive))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect
            return await asyncio.to_thread(_whole_answer, writer, whole.result())
        finally:
            whole.cancel()
            gone.cancel()
            answers.close()


def _whole_answer(writer: AnswerWriter, pieces: list[AnswerPiece]) -> Response:
    choices = [writer.choice(index, piece) for index, piece in enumerate(pieces)]
    return _json(writer.answer(choices, usage=writer.usage()))


async def _until_gone(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Return the body; Refused if it is too long or too slow."""

    async def read() -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > BODY:
                raise Refused(413, f"a body of more than {BODY:,} bytes\n  fix: send less in one call")
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), PATIENCE)
    except TimeoutError:
        raise Refused(408, f"the body did not come within {PATIENCE:.0f} s\n  fix: send it faster") from None


class _Answers:
    """The requests of a call: all asked at once, and ended by `close` if they are not finished."""

    def __init__(self, desk: Desk, call: ClientCall):
        self.desk, self.requests = desk, call.requests
        self.pieced: asyncio.Queue[tuple[int, AnswerPiece]] = asyncio.Queue()
        desk.figures.asked.inc(call.asked)
        for index, request in enumerate(call.requests):
            ask = Ask(call.top, call.echo[index] if call.echo else None, call.silent)
            desk.ask(request, ask, lambda piece, index=index: self.pieced.put_nowait((index, piece)))

    async def pieces(self) -> AsyncIterator[tuple[int, AnswerPiece]]:
        """Yield (index of an answer, a piece of it) as pieces come; Refused if the engine or an answer fails."""
        left = len(self.requests)
        while left:
            index, piece = await self.pieced.get()
            if piece.reason not in (None, "stop", "length"):
                _check_running(self.desk)
                raise Refused(500, piece.reason)
            left -= piece.reason is not None
            yield index, piece

    async def whole(self) -> list[AnswerPiece]:
        """Return each answer as one piece."""
        found: list[list[AnswerPiece]] = [[] for _ in self.requests]
        async for index, piece in self.pieces():
            found[index].append(piece)
        return [AnswerPiece.joined(pieces) for pieces in found]

    def close(self) -> None:
        for request in self.requests:
            self.desk.cancel(request.id)


class _Stream(StreamingResponse):
    """Server-sent events, each a JSON object; the last is [DONE]. It ends with its requests if the client leaves."""

    def __init__(self, answers: _Answers, writer: AnswerWriter):
        super().__init__(
            _events(answers, writer), headers={"Cache-Control": "no-store"}, media_type="text/event-stream"
        )
        self.answers = answers

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answers.close()


async def _events(answers: _Answers, writer: AnswerWriter) -> AsyncIterator[str]:
    try:
        for event in writer.first():
            yield _event(event)
        async for index, piece in answers.pieces():
            yield _event(writer.answer([writer.choice(index, piece)]))
        if writer.call.usage:
            yield _event(writer.answer([], usage=writer.usage()))
        yield "data: [DONE]\n\n"
    except Refused as error:
        yield _event(error.body())


def _event(data: dict) -> str:
    return f"data: {json.dumps(data)}\n\n"
