"""Functions for ranks and what is asked of their processes, which several tests of launch share."""

import time
from pathlib import Path

import torch
from machine import SOON

from scaling.collectives import all_reduce


def total(mesh) -> float:
    """The number of ranks, by a collective over all axes."""
    axes = "".join(mesh.sizes)
    return all_reduce(f"A[] {{U_{axes}}} -> A[]", torch.ones(()), mesh).item()


def running(pid: int) -> bool:
    """Whether a process exists and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def all_ended(pids, limit=SOON) -> bool:
    deadline = time.monotonic() + limit
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def hangs(mesh):
    time.sleep(60)
