"""The recipes that a mesh can run: microbatches, schedule, chunks, checkpointing, and when gradients are reduced."""

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from scaling.plan.job import POLICIES, REDUCES, SCHEDULES, Fixed, Job
from scaling.plan.network import Network

CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)  # the chunks of layers that a rank of an interleaved pipeline may hold


def recipes(job: Job, network: Network, fixed: Fixed) -> np.ndarray:
    """Return [(microbatches, schedule, chunks, remat, reduce)] that a mesh can run, words as codes.

    If params are sharded over fsdp alone, as in `scaling.train`, each chunk has a layer, because `scaling.train`
    refuses other recipes, and experts are not tried with "matmuls", which keeps all that they save, and hardly less
    than "attention". Elsewhere some chunks may have none.
    """
    w, size, own = job.work, network.sizes, job.shards == ("fsdp",)
    skipped = ("matmuls",) if w.experts_count > 1 and own else ()
    policies = tuple(policy for policy in POLICIES if policy not in skipped)
    most = w.L // size["pipe"] if own else -(-w.L // size["pipe"])
    return _recipes(_own(job, size), size["pipe"], most, policies, network.zero == 3, fixed)


def _own(job: Job, size: Mapping[str, int]) -> int:
    """Return how many sequences one replica has."""
    return -(-job.sequences // math.prod(size[axis] for axis in ("pod", "data", "fsdp", "expert")))


def no_recipe(job: Job, network: Network, fixed: Fixed) -> str:
    """Return why the user's choices leave a mesh no recipe."""
    own = _own(job, network.sizes)
    if fixed.microbatches and fixed.microbatches > own:
        whose = f"the {job.sequences:,}" if fixed.microbatches > job.sequences else f"a replica's {own:,}"
        return f"{fixed.microbatches:,} microbatches are more than {whose} sequences"
    return f"no schedule for {network.sizes['pipe']} stages with these microbatches"


@lru_cache(maxsize=4096)
def _recipes(own: int, stages: int, most: int, policies: tuple[str, ...], sharded: bool, fixed: Fixed) -> np.ndarray:
    counts = {own, *(2**i for i in range(own.bit_length()))} | {
        stages * 2**i for i in range(12) if stages * 2**i <= own
    }
    counts = {m for m in counts if m >= min(stages, own)}  # a pipeline has at least as many as stages, if it can
    runs = [("1f1b", 1)]
    if stages > 1:
        runs += [("interleaved", v) for v in CHUNKS if v <= most] + [("zb-h1", 1)]
        runs += [("dualpipev", 2)] * (most >= 2)
    if fixed.schedule:
        runs = [run for run in runs if run[0] == fixed.schedule] or [(fixed.schedule, 1)]
    if fixed.chunks:
        runs = sorted({(name, fixed.chunks) for name, v in runs if v > 1 or fixed.chunks == 1}) or runs
    reduces, found = (fixed.reduce,) if fixed.reduce else REDUCES, []
    for m in sorted(counts) if not fixed.microbatches else [fixed.microbatches] * (fixed.microbatches <= own):
        for name, v in runs:
            if (name == "interleaved" and m % stages) or (name == "dualpipev" and m < 2 * stages):
                continue  # as published, these need so many
            for policy in (fixed.remat,) if fixed.remat else policies:
                for reduce in reduces if sharded and m > 1 else ("once",):
                    found.append((m, SCHEDULES.index(name), v, POLICIES.index(policy), REDUCES.index(reduce)))
    return np.array(found, dtype=np.int64).reshape(-1, 5)
