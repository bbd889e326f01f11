"""Open the socket, and run the server on all ranks until it ends.

Rank 0 runs HTTP in the main thread and the engine in another thread; the other ranks run the engine alone.
"""

import asyncio
import contextlib
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from scaling.launch.ranks import on_signals
from scaling.serve.web.app import application
from scaling.serve.web.desk import Desk, News, Turns
from scaling.serve.web.words import Model

CONNECTIONS = 1024  # at once; others are answered 503
PATIENCE = 30.0  # seconds for a call's head to arrive


class Punctual(H11Protocol):
    """A connection that is closed if the head of a call begins and does not come to its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Watch the connection from its beginning."""
        super().connection_made(transport)
        self.loop.call_later(PATIENCE, self._look, self.cycle)

    def _look(self, before: Any) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is before and self.conn.their_state is h11.IDLE:
            self.transport.close()
        else:
            self.loop.call_later(PATIENCE, self._look, self.cycle)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that clients can reach at once, before the model is loaded; port 0 is any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}\n  fix: give another --port or --host") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited: no answer waits 40 ms for its own end
    return listener


def address(listener: socket.socket) -> str:
    """Return the address of a socket, such as http://127.0.0.1:8000."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_http(
    params: dict,
    model: Model,
    config: Any,
    listener: Any,
    *,
    mesh=None,
    queue: int = 64,
    key: str | None = None,
    cors: Sequence[str] = (),
    ready: Callable[[str, Callable[[int], None]], Any],
    **engine,
) -> None:
    """Serve at this socket until SIGINT or SIGTERM, on every rank.

    These signals let running requests finish; a second SIGINT does not. The other arguments are as in `application`
    and `Turns`.

    Args:
        params: This rank's params.
        model: The served model.
        config: Its config.
        listener: The socket, on rank 0.
        mesh: The mesh.
        queue: How many requests may wait.
        key: The key that clients have to send.
        cors: The origins whose pages may read answers.
        ready: Called as ready(address, stop) once clients are answered. stop(SIGTERM) does what that signal does, also
            outside of a main thread.
        **engine: Further options of the engine.
    """
    turns = Turns(params, config, model.options, mesh, tokenizer=model.tokenizer, **engine)
    if mesh is not None and mesh.rank:
        if listener is not None:  # inherited from the process that started the ranks
            listener.close()
        with on_signals(lambda number: None):
            while turns(News()) is not None:
                pass
        return
    desk = Desk(turns)
    server = _Server(
        uvicorn.Config(
            application(desk, model, queue=queue, key=key, cors=cors),
            http=Punctual,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            limit_concurrency=CONNECTIONS,
            server_header=False,
            proxy_headers=False,
        )
    )

    def stop(number: int) -> None:
        server.force_exit |= server.should_exit and number == signal.SIGINT  # a SIGTERM may follow
        server.should_exit = True

    async def talk() -> None:
        serving = asyncio.ensure_future(server.serve([listener]))
        serving.add_done_callback(lambda _: desk.close())
        ready(address(listener), stop)
        try:
            await desk.serve()
        finally:
            server.should_exit = True
            await asyncio.wait({serving}, timeout=10)

    with on_signals(stop):
        asyncio.run(talk())


class _Server(uvicorn.Server):
    """A server that leaves the signals to `serve_http`."""

    def captureon_signals(self) -> Any:
        """Capture no signals."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def passed_on() -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the ranks, in the process that has started them, and wait for their end.

    A Ctrl-C reaches the ranks directly, too, so they are sent SIGTERM, which may come twice.
    """

    def send(number: int) -> None:
        for child in multiprocessing.active_children():
            child.terminate()

    with on_signals(send):
        yield
