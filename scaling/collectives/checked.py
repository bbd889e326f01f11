"""The checked mode: the ranks of a group compare what they are about to do before they do it.

Ranks that call different collectives hang, abort, or get wrong numbers without an error, depending on the backend.
"""

from hashlib import blake2b

import torch
import torch.distributed as dist

from scaling.mesh import Group
from scaling.spec import ShardingError

DIGEST, LENGTH = 16, 400  # bytes that the ranks compare: a digest of the whole call, and its beginning to be shown


def agree(group: Group, call: str, x: torch.Tensor) -> None:
    """ShardingError on every rank of the group unless all make the same call on the same local shape and dtype."""
    if group.pg is None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return  # a tracer records the call, it does not make it
    text = f"{call} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}".encode()
    text = blake2b(text, digest_size=DIGEST).digest() + text[:LENGTH].ljust(LENGTH)
    device = "cpu" if group.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    all_calls = torch.empty(group.size, len(text), dtype=torch.uint8, device=device)
    dist.all_gather(list(all_calls), mine, group=group.pg)
    if bool((all_calls == mine).all()):
        return
    by_call: dict[bytes, list[int]] = {}
    for rank, said in zip(group.ranks, all_calls.tolist(), strict=True):
        by_call.setdefault(bytes(said), []).append(rank)
    lines = ""
    for said, ranks in by_call.items():
        who = f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}"
        lines += f"  {who}: {said[DIGEST:].decode(errors='replace').strip()}\n"
    raise ShardingError(
        f"the ranks along {', '.join(group.axes)} do not make the same call\n{lines}"
        f"  rule: all ranks of a group run the same lines in the same order, on shards of one shape and dtype"
    )


def agree_on(op, x: torch.Tensor) -> None:
    """The same for an `Op`, if its mesh is checked; also for one that autograd runs in a backward."""
    if not op.checked or op.size == 1 or op.kind in ("Slice", "Pad"):
        return
    pg, call = dist.distributed_c10d._resolve_process_group(op.group), f"{op.kind} {op.line}"
    if op.kind == "CollectivePermute":
        call += f" by {op.pairs}"
    if op.root is not None:
        call += f" with root {op.root}"
    if op.by != "sum":
        call += f" by {op.by}"
    ranks = tuple(dist.get_process_group_ranks(pg))
    agree(Group(op.axes, op.size, op.index, op.backend, ranks=ranks, pg=pg), call, x)
