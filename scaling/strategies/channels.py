"""Transfers of tensors between stages: sends without waits, and receives that are posted ahead.

Nothing relies on a transport's buffering: a send only keeps its tensor alive until it has completed, and a receive is
posted several messages before it is needed, so that one is always in flight. Between two ranks, tensors of one kind are
received in the order in which they were sent, which `scaling.schedules.simulator` checks.

All messages of a run have the shape, dtype and device of `like`: a stage checks its result against it before it sends.
Two stages could still differ in `like`. So a receiver first sends a *note*, a tensor that encodes the type, shape and
dtype that it expects. The sender compares the note with its own `like` before its first message, and raises an error if
they differ. Otherwise a shorter message would fill only a part of the receiver's buffer, without an error.

- gloo matches messages by their tag, over the group of the pipeline axis; messages of another shape have other tags.
- NCCL has no tags, and runs the queue of one communicator in order, so a posted receive would block the send behind
  it. Each direction and kind therefore has its own communicator of two ranks.
"""

from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from scaling import trace
from scaling.collectives.messages import announcement, data_tag, refuse_message
from scaling.collectives.op import as_carried
from scaling.common.limits import LIMITS
from scaling.common.torch_private import Nowhere
from scaling.mesh.lost import naming, raise_lost
from scaling.schedules.schedule import RECVS, RecvActivation, Schedule, SendActivation
from scaling.spec import parse, refuse


class Channels:
    """The transfers of one rank during one run of a schedule's program.

    `like` has the shape, dtype and device of every message. `ahead` receives are posted ahead on each channel, which is
    a direction (activations forward, or gradients back) and a peer.
    """

    def __init__(
        self, mesh, axis: str, schedule: Schedule, like: torch.Tensor, line: str, pairs: bool | None = None,
        ahead: int = LIMITS.ahead,
    ):  # fmt: skip
        self.group, self.spec, self.like, self.schedule = mesh.group((axis,)), parse(line), like, schedule
        self.abstract, self.axis = self.group.pg is None, axis
        pairs = self.group.backend == "nccl" if pairs is None else pairs
        self.pairs = pair_groups(mesh, axis, schedule) if pairs and not self.abstract else None
        self.sends: list = []
        self.posted: dict = {}
        self.to_post: dict[tuple, list] = {}
        for step in reversed(schedule[mesh.coord[axis]]):
            if isinstance(step, RECVS):
                self.to_post.setdefault((type(step), step.peer), []).append(step)
        self.note = announcement(self.spec, like, "cpu")
        self.kind, self.tag = bytes(self.note.tolist()), data_tag(self.note)
        self.noted: set[tuple] = mesh.lines.setdefault(("pipeline notes", axis), set())  # (kind of message, channel)
        for channel in sorted(self.to_post, key=lambda channel: (channel[0].__name__, channel[1])):
            self.send_note(self.to_post[channel][-1])
            for _ in range(ahead):
                self.post(channel)

    def post(self, channel: tuple) -> None:
        """Post the channel's next receive, if there is one left."""
        if self.to_post[channel]:
            step = self.to_post[channel].pop()
            buffer = torch.empty_like(self.like, memory_format=torch.contiguous_format)
            self.posted[step] = (
                (None if self.abstract else dist.irecv(as_carried(buffer)[0], **self.route(step, receive=True))),
                buffer,
            )

    def take(self, step) -> torch.Tensor:
        """Wait for the tensor of a Recv, and return it."""
        event = self.record("Recv", self.like, 0, step.peer) if trace.open_logs else None
        work, buffer = self.posted.pop(step)
        if work is not None:
            self.wait_for(work, step)
        self.post((type(step), step.peer))
        if event is not None:
            trace.done(event)
        return buffer

    def wait_for(self, work: Any, step) -> None:
        """Wait for a message to or from a step's peer; an error names the step and the peer's rank."""
        began = monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            peer = [self.group.member_of(step.peer)]
            raise_lost(error, f"{type(step).__name__} {self.spec}", self.group.pg, began, peer, peer)

    def send(self, step, x: torch.Tensor) -> None:
        """Start to send x; it must not be changed before `finish`."""
        self.check(step, x)
        if trace.open_logs:
            self.record("Send", x, x.numel() * x.element_size(), step.peer)
        if self.abstract and self.group.backend == "gloo":
            self.sends = [(Nowhere(), x)]  # it completes when the next one is sent
        elif not self.abstract:
            self.read_note(step)
            x = as_carried(x)[0].contiguous()
            self.sends = [(work, kept) for work, kept in self.sends if not work.is_completed()]
            self.sends.append((dist.isend(x, **self.route(step, receive=False)), x))

    def check(self, step, x: torch.Tensor) -> None:
        """Raise a ShardingError unless a stage's result has the shape, dtype and device that the next stage expects."""
        if x.shape != self.like.shape or x.dtype != self.like.dtype or x.device != self.like.device:
            found, wanted = (f"{y.dtype} {tuple(y.shape)} on {y.device}" for y in (x, self.like))
            what = f"stage {step.stage} hands on {found}, but microbatches of In are {wanted}"
            rule = "what stages hand to each other has the shape and the dtype of In"
            refuse(f"{type(step).__name__} {self.spec}", what, rule, "convert In, or the stage's result (autocast?)")

    def send_note(self, step) -> None:
        """Send the note of what this rank expects to the sender of a channel, once for each kind of message."""
        if self.is_new(step):
            note = self.note.to(self.like.device)
            self.sends.append((dist.isend(note, **self.route(step, receive=True, note=True)), note))

    def read_note(self, step) -> None:
        """Before the first message on a channel, receive its receiver's note, and raise an error if it differs."""
        if self.is_new(step):
            note = self.note.to(self.like.device, copy=True)
            arriving: Any = dist.irecv(note, **self.route(step, receive=False, note=True))
            self.wait_for(arriving, step)
            if not torch.equal(note.cpu(), self.note):
                refuse_message(self.spec, self.note, note, "this rank sends", f"rank {step.peer} expects")

    def is_new(self, step) -> bool:
        """Return whether this is the first use of the channel for this kind of message."""
        channel = self.kind, type(step), step.peer
        if self.abstract or channel in self.noted:
            return False
        self.noted.add(channel)
        return True

    def finish(self) -> None:
        """Wait until all sends have completed."""
        with naming(f"the sends of {self.spec} along {self.axis}", self.group.pg):
            for work, _ in self.sends:
                work.wait()
        self.sends = []

    def route(self, step, receive: bool, note: bool = False) -> dict:
        """Return the arguments of isend or irecv: the group, the other rank and the tag.

        `receive`: Whether this rank receives the step's tensor. Its note then travels the other way, from this rank.
        """
        activation = isinstance(step, (RecvActivation, SendActivation))
        end = "group_src" if receive is not note else "group_dst"
        if self.pairs is None:
            message = step.stage * self.schedule.microbatches + step.microbatch
            tag = activation if note else self.tag + 2 * message + activation
            return {"group": self.group.pg, end: self.group.member_of(step.peer), "tag": tag}
        me = self.group.index
        ends = (step.peer, me) if receive else (me, step.peer)
        return {"group": self.pairs[(activation, *ends)], end: int(step.peer > me)}

    def record(self, op: str, x: torch.Tensor, wire_bytes: int, peer: int) -> trace.Event:
        """Record a transfer of x in the open traces, and return its event."""
        nbytes = x.numel() * x.element_size()
        who = {"group": self.group.name, "peers": (self.group.member_of(peer),)}
        event = trace.Event(op, (self.axis,), self.spec, self.spec, nbytes, wire_bytes, async_op=op == "Send", **who)
        trace.record(event)
        if event.async_op:  # nobody waits for it
            trace.call_returned(event)
            trace.done(event)
        return event


def pair_groups(mesh, axis: str, schedule: Schedule) -> dict[tuple, "dist.ProcessGroup"]:
    """Return a process group of two for each (whether activations, source, target) of this rank's transfers.

    All ranks make them and use them once in one order, because NCCL connects two ranks at their first transfer, and
    both wait for that. For a transfer between other ranks, a rank makes a group of itself: torch names a group by its
    ranks and by the number of groups, and both ends must give it one name.
    """
    group = mesh.group((axis,))
    wanted = set()
    for rank, program in enumerate(schedule):
        for step in program:
            if isinstance(step, RECVS):
                wanted.add((isinstance(step, RecvActivation), step.peer, rank))
    made = mesh.lines.setdefault(("pipeline channels", axis), {})
    for key in sorted(wanted - set(made)):
        _, source, target = key
        ends = (source, target) if group.index in (source, target) else (group.index,)
        ranks = sorted(group.ranks[group.member_of(end)] for end in ends)
        made[key] = dist.new_group(ranks, timeout=timedelta(seconds=mesh.timeout), use_local_synchronization=True)
        if len(ends) == 1:
            continue
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=made[key])
        first = torch.zeros(1, device=mesh.device)
        if group.index == source:
            dist.send(first, group=made[key], group_dst=int(target > source))
        else:
            dist.recv(first, group=made[key], group_src=int(source > target))
    return made
