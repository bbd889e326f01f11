"""The checked mode: the ranks of a group compare what they are about to do before they do it.

Ranks that call different collectives hang, abort, or get wrong numbers without an error, depending on the backend.
"""

import torch
import torch.distributed as dist

from scaling.mesh import Group
from scaling.spec import ShardingError

LENGTH = 400  # bytes of a call that are compared


def agree(group: Group, call: str, x: torch.Tensor) -> None:
    """ShardingError on every rank of the group unless all make the same call on the same local shape and dtype."""
    if group.pg is None or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return  # a tracer records the call, it does not make it
    text = f"{call} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}".encode()[:LENGTH]
    device = "cpu" if group.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
    mine = torch.frombuffer(bytearray(text.ljust(LENGTH)), dtype=torch.uint8).to(device)
    all_calls = torch.empty(group.size, LENGTH, dtype=torch.uint8, device=device)
    dist.all_gather(list(all_calls), mine, group=group.pg)
    if bool((all_calls == mine).all()):
        return
    calls = [bytes(row.tolist()).decode(errors="replace").strip() for row in all_calls.cpu()]
    by_call: dict[str, list[int]] = {}
    for rank, said in zip(group.ranks, calls, strict=True):
        by_call.setdefault(said, []).append(rank)
    lines = "\n".join(f"  rank{'s' * (len(ranks) > 1)} {ranks}: {said}" for said, ranks in by_call.items())
    raise ShardingError(
        f"the ranks along {', '.join(group.axes)} do not make the same call\n{lines}\n"
        f"  rule: all ranks of a group run the same lines in the same order, on shards of one shape and dtype"
    )
