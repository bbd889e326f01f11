"""Every mesh of so many chips for a model and a batch, the fastest that fits first."""

import math
from collections.abc import Iterator

from scaling.cost import transformer as tm
from scaling.hardware import Chip
from scaling.plan.evaluate import Job, Plan, evaluate
from scaling.plan.network import AXES, Network, slice_shape


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def networks(job: Job, chip: Chip, chips: int, pods: int | None = None) -> Iterator[Network]:
    """Every way to lay so many chips out as pod x pipe x data x fsdp x tensor."""
    config = job.config
    tpu = chip.kind == "tpu"
    if pods is None:
        pods = max(1, math.ceil(chips / chip.pod_chips)) if tpu and chip.pod else 1
    if chips % pods:
        raise ValueError(f"{chips:,} chips do not divide into {pods} pods")
    per_pod = chips // pods
    rings = all(chip.wraps(slice_shape(chip, per_pod))) if tpu else True
    for Y in divisors(math.gcd(per_pod, config.N)):
        if config.F % Y:  # tensor parallelism splits whole heads, and F
            continue
        for Z in divisors(per_pod // Y):
            if config.L % Z or Z > 64:
                continue
            rest = per_pod // (Y * Z)
            for X in divisors(rest) if chip.kind == "gpu" else sorted({1, rest}):
                sizes = {"pod": pods, "pipe": Z, "data": rest // X, "fsdp": X, "tensor": Y}
                used = [axis for axis in AXES[1:] if sizes[axis] > 1]
                if not tpu:
                    yield Network(chip, sizes)
                    continue
                for torus in shares(chip.axes, used, sizes):
                    yield Network(chip, sizes, torus, rings)


def shares(axes: int, used: list[str], sizes: dict[str, int]) -> list[dict[str, int]]:
    """Ways to share a torus' axes among the mesh axes used: one for pipe, one or two for tensor, the rest to the other.

    None if there are more mesh axes than torus axes. A mesh axis of 4 spans at most two torus axes, of 2 one.
    """
    ways = []
    others = [axis for axis in used if axis not in ("pipe", "tensor")]
    left = axes - ("pipe" in used)
    for tensor in (0,) if "tensor" not in used else (1, 2) if others else (left,):
        rest = left - tensor
        if rest < len(others) or left < 0:
            continue
        torus = {"pipe": 1, "tensor": tensor} | dict.fromkeys(others, rest)
        torus = {axis: min(torus[axis], sizes[axis].bit_length() - 1) for axis in used}
        if torus not in ways and min(torus.values(), default=1) >= 1:
            ways.append(torus)
    return ways


def plans(job: Job, chip: Chip, chips: int, pods: int | None = None, remat: str | None = None) -> list[Plan]:
    """All meshes, each with the checkpointing and the number of microbatches that make it fastest, the fastest first.

    Those that do not fit come last, the smallest first. Ties: the least communication, the fewest microbatches.
    """
    if not isinstance(chips, int) or chips < 1:
        raise ValueError(f"chips = {chips!r}: must be a whole number of at least 1")
    if remat is not None and remat not in tm.REMAT:
        raise ValueError(f"unknown remat {remat!r}: one of {', '.join(tm.REMAT)}")
    found = []
    for network in networks(job, chip, chips, pods):
        tried = list(attempts(job, network, (remat,) if remat else tm.REMAT))
        if tried:
            found.append(min(tried, key=lambda plan: rank(plan, chip)))
    return sorted(found, key=lambda plan: rank(plan, chip))


def attempts(job: Job, network: Network, policies: tuple[str, ...]) -> Iterator[Plan]:
    """One mesh with ever more microbatches, until more cannot help; of each, the first policy that fits."""
    size = network.sizes
    replicas = math.prod(size[axis] for axis in ("pod", "data", "fsdp"))
    most = max(1, job.batch // (job.seq * replicas))  # at least a sequence each
    start = 1 if size["pipe"] == 1 else 1 << (size["pipe"] - 1).bit_length()
    for m in (start << i for i in range(16)):
        if m > max(most, start):
            return
        for policy in policies:
            try:
                plan = evaluate(job, network, policy, m)
            except ValueError as error:  # a mesh that the tree of switches cannot hold
                if "do not fill whole units" in str(error):
                    return
                raise
            yield plan
            if fits(plan, network.chip):
                break
        if plan.remat == policies[0] and fits(plan, network.chip) and plan.bubble < 0.02:
            return


def fits(plan: Plan, chip: Chip) -> bool:
    return plan.held <= chip.need("hbm_bytes")


def rank(plan: Plan, chip: Chip) -> tuple:
    if not fits(plan, chip):
        return (True, plan.held)
    return (False, round(plan.seconds, 6), round(plan.cost.comms, 6), plan.microbatches, plan.size("tensor"), plan.held)
