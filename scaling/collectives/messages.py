"""Send and receive typed messages: the receiver reads only the message that it expects.

Each message is announced by a header: a digest of its type, shape and dtype, and the beginning of their text. The
receiver compares it with the header it expects. On gloo the tag of the data is derived from the digest too, so that the
data of another message never ends up in the buffer. NCCL has no tags, so the data is received after its header.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaling import trace
from scaling.collectives.linear import Pending, differentiated, who_watches
from scaling.collectives.lines import check_operand
from scaling.collectives.op import as_carried
from scaling.mesh import Group
from scaling.mesh.lost import naming
from scaling.spec import Line, ShardingError, parse, refuse

DIGEST, LENGTH = 16, 112  # bytes of a header: a digest of the whole announcement, and the beginning of its text
TAG = 1 << 21  # the tag of headers; the tags of data are larger
PAIRS = "to each send belongs a recv on the other rank, and to each recv a send, of the same type"


def send(line: str, x: Tensor, mesh, axis: str, to: int, *, async_op: bool = False):
    """Send x to the rank at `to` along the axis, which calls `recv` with the same type.

    A send cannot be differentiated, since its transpose is on another rank; `ppermute` can.
    """
    group, event = _ready("Send", line, x, mesh, axis, to, async_op)
    works: list[Any] = []
    if group.pg is not None:
        header, data = announcement(parse(line), x, mesh.device), as_carried(x)[0].contiguous()
        peer = {"group": group.pg, "group_dst": group.member_of(to)}
        sent: list[Any] = [dist.isend(header, tag=TAG, **peer), dist.isend(data, tag=data_tag(header), **peer)]

        def finish(kept=(header, data)) -> None:  # which must not be freed until they have been sent
            for work in sent:
                work.wait()

        works = [MessageInFlight(finish, f"Send {parse(line)} to rank {to} along {axis}", group, to)]
    pending = Pending(works, lambda: x, event, f"Send: {parse(line)}")
    return pending if async_op else pending.wait()


def recv(line: str, like: Tensor, mesh, axis: str, source: int, *, async_op: bool = False):
    """Receive a tensor like `like` from the rank at `source` along the axis, which calls `send` with the same type.

    Raises:
        ShardingError: the sender sends another type, shape or dtype.
    """
    group, event = _ready("Recv", line, like, mesh, axis, source, async_op)
    buffer = torch.empty(like.shape, dtype=like.dtype, device=mesh.device)
    if (watch := who_watches()) is not None:
        watch.receive(buffer, parse(line))
    works = [] if group.pg is None else [arriving(parse(line), buffer, group, source)]
    pending = Pending(works, lambda: buffer, event, f"Recv: {parse(line)}")
    return pending if async_op else pending.wait()


class MessageInFlight:
    """A message in flight; `finish` waits until it has been sent to a rank, or has come from there."""

    def __init__(self, finish: Callable[[], None], call: str, group: Group, rank: int):
        self.finish, self.call, self.group, self.rank = finish, call, group, rank

    def wait(self) -> None:
        """Wait for the message. If it fails, the error names the call and the rank."""
        with naming(self.call, self.group.pg, [self.group.member_of(self.rank)], PAIRS):
            self.finish()


def arriving(spec, buffer: Tensor, group: Group, source: int) -> MessageInFlight:
    """Start receiving a message into a buffer; its header is checked when it is waited for."""
    peer = {"group": group.pg, "group_src": group.member_of(source)}
    wanted, header = (announcement(spec, buffer, buffer.device) for _ in range(2))
    announced: Any = dist.irecv(header, tag=TAG, **peer)

    def receive() -> Any:
        return dist.irecv(as_carried(buffer)[0], tag=data_tag(wanted), **peer)

    data = receive() if group.backend == "gloo" else None

    def finish() -> None:
        announced.wait()
        if not torch.equal(header, wanted):
            refuse_message(spec, header, wanted, f"rank {source} sends", "this rank expects")
        (data or receive()).wait()

    return MessageInFlight(finish, f"Recv {spec} from rank {source} along {group.axes[0]}", group, source)


def announcement(spec, x: Tensor, device) -> Tensor:
    """Return the header of a message x of type `spec`, uint8[DIGEST + LENGTH]."""
    text = f"{spec} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}".encode()
    text = blake2b(text, digest_size=DIGEST).digest() + text[:LENGTH].ljust(LENGTH)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def in_words(header: Tensor) -> str:
    """Return the text in a header."""
    return bytes(header[DIGEST:].tolist()).decode(errors="replace").strip()


def data_tag(header: Tensor) -> int:
    """Return a tag that other messages do not have: 29 bits of the digest above the tags in use."""
    a, b, c, d = header[:4].tolist()
    return (1 << 30) + (((a << 24) | (b << 16) | (c << 8) | d) & ((1 << 29) - 1))


def refuse_message(spec, sent: Tensor, expected: Tensor, sender: str, receiver: str) -> None:
    """Raise the error of a message that is not the expected one."""
    rule = "what is received has the type, the shape and the dtype of what is sent"
    what = f"{sender} {in_words(sent)}\n  {receiver} {in_words(expected)}"
    refuse(spec, what, rule, "make both ends alike, e.g. by x.to(dtype) before it is sent")


def _ready(kind: str, line: str, x: Tensor, mesh, axis: str, other: int, async_op: bool):
    """Return (the group along the axis, the event of a trace or None). Raise an error if the message cannot be sent."""
    spec, group = parse(line), mesh.group((axis,))
    spec.check_axes(mesh)
    if (watch := who_watches()) is not None:
        watch.message(kind, spec, x, axis)
    check_operand(kind, Line((spec,), spec), group, x, mesh)
    if differentiated(x):
        raise ShardingError(
            f"{kind} {spec}: not differentiable, since its transpose lies on another rank\n  fix: use ppermute"
        )
    if not 0 <= other < group.size or other == group.index:
        raise ShardingError(
            f"{kind} {spec}: rank {other} along {axis} must be another one of 0..{group.size - 1}"
            f"\n  fix: give the place of another rank along {axis}"
        )
    if not trace.open_logs:
        return group, None
    nbytes = x.numel() * x.element_size()
    sent = nbytes if kind == "Send" else 0
    event = trace.Event(
        kind, group.axes, spec, spec, nbytes, sent, async_op=async_op, group=group.name, peers=(group.member_of(other),)
    )
    return group, trace.record(event)
