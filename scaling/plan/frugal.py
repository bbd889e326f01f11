"""Ways to train a model that does not fit: a smaller optimizer, a host's memory, or adapters added to frozen weights.

LoRA (arXiv:2106.09685) trains two thin matrices of rank `RANK` for each weight, which stays frozen in bf16; QLoRA
(arXiv:2305.14314) keeps the frozen weights of the layers in 4 bits with their scales, 4.127 bits each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaling.configs import Config
from scaling.hardware import Chip
from scaling.plan.job import Job

RANK = 16  # the rank of the adapters
NF4 = 4.127 / 8  # bytes of a weight with its scales, which are quantized too
ADAPTED = 16  # bytes of an adapter's param: fp32 with its gradient and Adam's moments


@dataclass(frozen=True)
class Frugal:
    """A way to train in less memory: the job that remains on the chips, and the bytes of the adapters on each chip."""

    name: str
    job: Job
    adapters: float
    says: str

    def on(self, chip: Chip) -> Job:
        """Return the job with the adapters' bytes taken off the memory that it may use."""
        less = self.adapters / chip.need("hbm_bytes")
        return replace(self.job, headroom=max(1e-6, self.job.headroom - less))


def adapter_params(config: Config) -> float:
    """Return the params of LoRA's adapters for attention's and the MLP's matrices of a dense model."""
    c = config
    widths = [
        c.N * c.H,
        c.K * c.H,
        c.K * c.H,
        c.N * c.H,
        *[c.F] * c.matrices,
    ]  # the widths of Q, K, V, O and the MLP's matrices other than D
    return c.L * RANK * sum(c.D + width for width in widths)


def frugal_ways(job: Job) -> Iterator[Frugal]:
    """Yield the ways that need less memory than the job itself, first the ways that train all params."""
    params = job.work.params
    if job.optimizer_bytes > 2:
        yield Frugal("8-bit Adam", replace(job, optimizer_bytes=2), 0.0, "its two moments take a byte each")
    if job.optimizer_bytes:
        host = job.optimizer_bytes * params / 1e9
        says = f"its state, {host:,.0f} GB in all, waits in the hosts' memory and is updated there"
        yield Frugal("Adam on the host", replace(job, optimizer_bytes=0), 0.0, says)
    says = "layers' inputs wait in the hosts' memory until the backward pass"
    yield Frugal("activations on the host", replace(job, offload=True), 0.0, says)
    if not isinstance(job.config, Config):
        return
    adapters = ADAPTED * adapter_params(job.config)
    frozen = replace(job, grad_bytes=0, optimizer_bytes=0)
    own = f"{adapter_params(job.config) / 1e6:,.0f}e6 params of adapters of rank {RANK} are trained, all others frozen"
    yield Frugal("LoRA", replace(frozen, param_bytes=2), adapters, f"{own} in bf16")
    ends = max(job.work.ends) if job.work.tied else sum(job.work.ends)
    each = (NF4 * (params - ends) + 2 * ends) / params
    yield Frugal("QLoRA", replace(frozen, param_bytes=each), adapters, f"{own} in 4 bits")
