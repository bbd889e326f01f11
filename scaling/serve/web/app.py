"""What each address answers: the application, of Starlette, that a server runs beside the loop of the engine.

Whatever a client sends is answered with a status and a reason, and ends nothing but its own call.
"""

import asyncio
import contextlib
import hmac
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from scaling.serve.web.desk import AnswerPiece, Ask, Desk
from scaling.serve.web.words import AnswerWriter, Asked, Model, NotServed, read_body

BODY = 4 << 20  # bytes of a body, at most
PATIENCE = 30.0  # seconds in which a body has to come
OPEN = ("/", "/health")  # need no key
PAGE = Path(__file__).with_name("page.html")
ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


class Refused(Exception):
    """A call that is answered with this status and this reason."""

    def __init__(self, status: int, reason: str):
        self.status, self.reason = status, reason


class Vanished(Exception):
    """The client has gone away."""


def application(desk: Desk, model: Model, *, queue: int = 64, key: str | None = None) -> Starlette:
    """The calls of one server. `queue`: requests that may wait beside those in the slots. `key`: what a client has to
    send, as `Authorization: Bearer KEY`."""
    calls = _Calls(desk, model, queue)
    routes = [
        Route("/", calls.page), Route("/health", calls.health), Route("/metrics", calls.metrics),
        Route("/figures", calls.figures), Route("/v1/models", calls.models),
        Route("/v1/models/{name:path}", calls.models),
        Route("/v1/completions", partial(calls.complete, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", partial(calls.complete, chat=True), methods=["POST"]),
    ]  # fmt: skip
    routes = [Route(route.path, _answered(route.endpoint, desk, key), methods=route.methods) for route in routes]

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return _error(desk, status, f"{request.method} {request.url.path:.80} is not served")

    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})


def _answered(endpoint: Callable, desk: Desk, key: str | None) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint behind the key, with an answer for all that it refuses."""

    async def answer(request: Request) -> Response:
        try:
            if key is not None and request.url.path not in OPEN:
                _check_key(request, key)
            return await endpoint(request)
        except Refused as error:
            return _error(desk, error.status, error.reason)
        except (Vanished, ClientDisconnect):
            return Response(status_code=499)  # which nobody reads

    return answer


def _check_key(request: Request, key: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.encode(errors="replace"), key.encode())
    if scheme.lower() != "bearer" or not same:
        raise Refused(401, "the key is missing or wrong\n  fix: send the header Authorization: Bearer KEY")


def _error(desk: Desk, status: int, reason: str) -> Response:
    desk.figures.refusals.labels(str(status)).inc()
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error" if status >= 500 else "busy"
    body = {"error": {"message": reason, "type": kind, "param": None, "code": None}}
    return _json(body, status, {"Retry-After": "1"} if status in (429, 503) else None)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


class _Calls:
    def __init__(self, desk: Desk, model: Model, queue: int):
        self.desk, self.model = desk, model
        self.most = model.options.slots + queue
        self.open: set[int] = set()  # ids of requests under way
        self.ids = itertools.count()

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(), headers={"Content-Security-Policy": ALONE})

    async def health(self, request: Request) -> Response:
        if self.desk.failed:
            raise Refused(503, f"the engine has ended: {self.desk.failed}")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.desk.figures.text(self.desk.state), media_type="text/plain; version=0.0.4")

    async def figures(self, request: Request) -> Response:
        return JSONResponse(self.desk.figures.now(self.desk.state))

    async def models(self, request: Request) -> Response:
        name, created = request.path_params.get("name"), 0
        own = {"id": self.model.name, "object": "model", "created": created, "owned_by": "scaling"}
        own |= {"max_model_len": self.model.options.length, "chat": self.model.chat is not None}
        if name is not None and name != self.model.name:
            raise Refused(404, f"model {name!r:.80} is not served here\n  fix: give {self.model.name!r}")
        return _json({"object": "list", "data": [own]} if name is None else own)

    async def complete(self, request: Request, chat: bool) -> Response:
        body = await _body(request)
        try:
            call = await asyncio.to_thread(read_body, body, self.model, chat)
        except NotServed as error:
            raise Refused(404, str(error)) from None
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise Refused(400, str(error)) from None
        if self.desk.failed:
            raise Refused(503, f"the engine has ended: {self.desk.failed}")
        if len(self.open) + len(call.prompts) > self.most:
            text = f"{len(self.open)} requests are under way, of at most {self.most}"
            raise Refused(429, f"{text}\n  fix: try again later, or ask for fewer answers at once")
        answers = _Answers(self, call)
        writer = AnswerWriter(call, self.model)
        if call.stream:
            return _Stream(answers, writer)
        try:
            pieces: list[list[AnswerPiece]] = [[] for _ in call.prompts]
            async for index, piece in answers.pieces(request.receive):
                pieces[index].append(piece)
        finally:
            answers.close()
        return _json(writer.whole(pieces))


async def _body(request: Request) -> bytes:
    """The body. Refused if it is too long or too slow."""

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
    """The requests of a call: asked at once, ended by `close` where they are not through."""

    def __init__(self, calls: _Calls, call: Asked):
        self.calls, self.left = calls, set()
        self.pieced: asyncio.Queue[tuple[int, AnswerPiece | None]] = asyncio.Queue()
        self.requests = call.requests(calls.ids)
        self.loop = asyncio.get_running_loop()
        draws = call.wish.draws(call.prompts)
        calls.desk.figures.asked.inc(call.asked)
        for index, (request, draw) in enumerate(zip(self.requests, draws, strict=True)):
            self.left.add(request.id)
            calls.open.add(request.id)
            calls.desk.ask(Ask(request, draw), call.wish.stops, call.top, partial(self.sent, index))

    def sent(self, index: int, piece: AnswerPiece) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # where the server has been ended by force
            self.loop.call_soon_threadsafe(self.take, index, piece)

    def take(self, index: int, piece: AnswerPiece) -> None:
        if piece.reason is not None:
            self.left.discard(self.requests[index].id)
            self.calls.open.discard(self.requests[index].id)
        self.pieced.put_nowait((index, piece))

    async def pieces(self, receive: Callable) -> AsyncIterator[tuple[int, AnswerPiece]]:
        """(which answer, what of it), as it comes. Vanished if the client is, Refused where the engine ends."""
        watch = asyncio.ensure_future(_until_gone(receive))
        watch.add_done_callback(lambda _: self.pieced.put_nowait((0, None)))
        try:
            for _ in self.requests:
                while True:
                    index, piece = await self.pieced.get()
                    if piece is None:
                        raise Vanished
                    if piece.reason not in (None, "stop", "length"):
                        raise Refused(503, f"the engine has ended: {self.calls.desk.failed}")
                    yield index, piece
                    if piece.reason is not None:
                        break
        finally:
            watch.cancel()

    def close(self) -> None:
        for id in self.left:
            self.calls.desk.cancel(id)
            self.calls.open.discard(id)


async def _until_gone(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream(Response):
    """Server-sent events, each a JSON object; the last is [DONE]."""

    def __init__(self, answers: _Answers, writer: AnswerWriter):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self.answers, self.writer = answers, writer

    async def __call__(self, scope, receive, send) -> None:
        async def say(text: str, more: bool = True) -> None:
            data = f"data: {text}\n\n" if text else ""
            await send({"type": "http.response.body", "body": data.encode(), "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for event in self.writer.first():
                await say(json.dumps(event))
            async for index, piece in self.answers.pieces(receive):
                await say(json.dumps(self.writer.piece(index, piece)))
            if self.writer.call.usage:
                await say(json.dumps(self.writer.last()))
            await say("[DONE]", more=False)
        except Refused as error:
            await say(json.dumps({"error": {"message": error.reason, "type": "server_error"}}), more=False)
        except (Vanished, OSError):
            pass
        finally:
            self.answers.close()
