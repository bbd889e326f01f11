"""Serving under limits of the time to the first token and of each further one: prompts on the same chips, or apart.

Together, prompts run between the steps: a token waits for other requests' prompts. Apart, some chips run prompts alone
and send the caches to the chips that decode (arXiv:2401.09670).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scaling.hardware import Chip
from scaling.plan.serve.candidates import Service, ServingPlan, plans, slice_shapes
from scaling.plan.serve.forecast import PromptRun

MOST = 16  # the most replicas that decode, if the number of chips is free


@dataclass(frozen=True)
class Deployment:
    """Instances that decode, and if prompts run apart, `instances` that run them on the slices of `prompts`."""

    decode: ServingPlan
    prompts: PromptRun | None = None
    instances: int = 0

    @property
    def chips(self) -> int:
        """All chips that are used."""
        return self.decode.chips * self.decode.replicas + self.instances * (self.prompts.chips if self.prompts else 0)

    @property
    def ttft(self) -> float:
        """Seconds to the first token, as forecast."""
        return self.prompts.alone + cache_move(self.decode) if self.prompts else self.decode.ttft

    @property
    def tpot(self) -> float:
        """Seconds of each further token, as forecast."""
        return self.decode.tpot

    @property
    def requests(self) -> float:
        """Requests per second."""
        return min(self.decode.requests, self.instances * self.prompts.rate if self.prompts else math.inf)

    @property
    def per_chip(self) -> float:
        """Generated tokens per second and chip."""
        return self.requests * self.decode.service.generated / self.chips


def cache_move(plan: ServingPlan) -> float:
    """Return the seconds in which a prompt's cache moves to the chips that decode."""
    chip, over = plan.chip, plan.chip.dcn_bw or plan.chip.link_bw
    if chip.kind == "gpu":
        over = chip.levels[1].child_bw / chip.node_gpus if len(chip.levels) > 1 else chip.bandwidth("node")
    return plan.load.kv(plan.service.prompt) / (plan.chips * over) if over else 0.0


def prompt_servers(service: Service, chip: Chip, chips: int | None, most: int) -> Iterator[PromptRun]:
    """Yield the slices on which a prompt, with the weights, fits and is in time."""
    for shape in slice_shapes(chip, None, min(most, chips - 1) if chips else most):
        one = PromptRun(service, chip, shape)
        room = service.headroom * one.chips * chip.need("hbm_bytes")
        held = service.load.weights + service.load.kv(service.prompt)
        if held <= room and (service.ttft is None or one.alone <= service.ttft):
            yield one


def prompts_apart(service: Service, chip: Chip, chips: int | None, most: int, **fixed) -> Deployment | None:
    """Return the best deployment whose prompts run on other chips, or None."""
    servers = sorted(prompt_servers(service, chip, chips, most), key=lambda one: -one.rate / one.chips)
    best: Deployment | None = None
    if not servers:
        return None
    for shape in slice_shapes(chip, None, min(most, chips - servers[-1].chips) if chips else most):
        size = math.prod(shape)
        for plan in plans(service, chip, chips=size, most=size, apart=True, **fixed)[:1]:
            for server in servers[:2]:
                for n in range(1, chips // size + 1 if chips else MOST + 1):
                    decode = replace(plan, replicas=n)
                    m = (chips - n * size) // server.chips if chips else math.ceil(decode.requests / server.rate)
                    one = Deployment(decode, server, min(m, math.ceil(decode.requests / server.rate)))
                    if m and (service.ttft is None or one.ttft <= service.ttft):
                        best = max(filter(None, (best, one)), key=lambda d: d.requests if chips else d.per_chip)
    return best


def deployments(service: Service, chip: Chip, found: list[ServingPlan], chips: int | None, most: int, **fixed):
    """Return at most two deployments, the better first: the first plan of `found`, and the best with prompts apart."""
    both = [Deployment(found[0])] if found else []
    both += filter(None, [prompts_apart(service, chip, chips, most, **fixed)])
    return sorted(both, key=lambda one: -one.per_chip)
