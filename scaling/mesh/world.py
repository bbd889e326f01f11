"""Join the ranks of a run and choose their devices, before there is a mesh."""

from datetime import timedelta

import torch
import torch.distributed as dist

from scaling.common.torchrun import this_rank
from scaling.spec import ShardingError

TIMEOUT = 120.0  # seconds that a collective waits for the other ranks before it raises


def check_device(device) -> None:
    """Raise a ShardingError for a device that this machine, or this torch, does not have."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ShardingError(f"device {device}: torch finds no GPU here\n  fix: leave the device out, to run on the CPU")


def join_world(device, timeout: float = TIMEOUT, store=None, rank: int = -1, world: int = -1) -> None:
    """Join the run's process group: gloo on CPU, NCCL on CUDA. Without a store, torchrun's environment says where."""
    device = torch.device(device)
    backend = "gloo"
    if device.type == "cuda":
        local = rank if store is not None else this_rank().local_rank
        if local >= torch.cuda.device_count():
            have = torch.cuda.device_count()
            raise ValueError(
                f"rank {local} needs its own GPU, but there are {have}\n  fix: use fewer ranks, or the cpu"
            )
        torch.cuda.set_device(local)
        backend = "nccl"
    where = {"store": store, "rank": rank, "world_size": world} if store is not None else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **where)
