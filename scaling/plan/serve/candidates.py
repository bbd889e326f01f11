"""Every way to serve a model on a chip's slices, each with its best batch: slice x form x mesh, the best first.

Seconds are bounds: reading, computing and sending overlap (`scaling.cost.serving.DecodeStep`), and collectives use the
slice's own wraparound. Throughput per chip does not fall with the batch. So each mesh counts with the largest batch
that fits and is fast enough, or with a smaller one of the same throughput.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from scaling.common.arguments import one_of
from scaling.configs import Config
from scaling.cost import decoding, serving
from scaling.cost.memory import ROOM
from scaling.cost.transformer import prefill_flops
from scaling.hardware import Chip
from scaling.plan.candidates import divisors
from scaling.plan.serve.forecast import ENGINES, Forecast, first_token, likely_token, prompt_run
from scaling.spec import dtype_bytes

COPIES = 1.25  # the most experts that may be stored, as a multiple of the model's experts
AS_MUCH = 1 - 1e-6  # the share of the best throughput at which a smaller batch counts as equal


@dataclass(frozen=True)
class Service:
    """The request: a model, the dtypes of its weights, KV cache and matmuls, and the lengths of its requests.

    A sequence is counted at its full `context` (prompt and output), as in the book. With `over_time` it is counted at
    the prompt and half of the output, its mean length over time, and int8 caches are counted with their scales.
    `latency`: the most seconds of a step; `ttft`, `tpot`: the most seconds that may be forecast for the first token and
    for each further one in an `engine`; None sets no limit. `copied`: experts of the config that are stored twice.
    `headroom`: the share of the memory to fill. `mfu`: the MFU of prefill on TPUs. `wait`: the decode steps that the
    engine is set to wait before it runs prompts.
    """

    config: Config
    context: int
    generated: int = 512
    weights: str = "int8"
    kv: str = "int8"
    compute: str = "bf16"
    latency: float | None = None
    headroom: float = ROOM
    mfu: float = 0.4
    over_time: bool = False
    ttft: float | None = None
    tpot: float | None = None
    engine: str = "vllm"
    copied: int = 0
    wait: int = 0

    def __post_init__(self):
        one_of("engine", self.engine, ENGINES)
        if not 1 <= self.generated < self.context:
            raise ValueError(
                f"{self.generated} tokens of output do not fit a context of {self.context}\n"
                "  fix: give a context as long as prompt and output"
            )

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.context - self.generated

    @property
    def seen(self) -> float:
        """Tokens of a sequence that a step sees."""
        return self.prompt + self.generated / 2 if self.over_time else self.context

    @cached_property
    def prompt_flops(self) -> float:
        """FLOPs of a prompt."""
        return prefill_flops(self.config, self.prompt)

    @cached_property
    def load(self) -> serving.Load:
        """The bytes and FLOPs of the model."""
        one, c = serving.load(self.config, self.weights, self.kv), self.config
        if not (self.over_time and self.kv == "int8"):
            return one
        whole = 1 + 4 / (
            c.latent.kv_rank + c.latent.rope if c.latent else c.H
        )  # a scale in fp32 for each token and head
        local = tuple((window, whole * each) for window, each in one.local)
        return replace(one, kv_token=whole * one.kv_token, local=local, kv_flops=one.kv_flops / whole)


@dataclass(frozen=True)
class ServingPlan:
    """One way to serve a model: a slice, a form on a mesh of it, a batch. Bytes and seconds are a chip's.

    With `apart`, other chips run the prompts.
    """

    service: Service
    chip: Chip
    shape: tuple[int, ...]
    form: str
    sizes: tuple[tuple[str, int], ...]
    batch: int
    replicas: int = 1
    apart: bool = False

    @property
    def chips(self) -> int:
        """The chips of one replica."""
        return math.prod(self.shape)

    @cached_property
    def copies(self) -> float:
        """The number of copies of the cache."""
        return decoding.copies(self.service.config, dict(self.sizes))

    @cached_property
    def load(self) -> serving.Load:
        """The service's bytes and FLOPs, where weights that several chips store count once for each of them.

        W_K and W_V, or W_DQ and W_DKV, are split over no more axes than their cache. All weights but experts are copied
        along E, and in the form "experts" the shared experts along Y.
        """
        c, sizes, load = self.service.config, dict(self.sizes), self.service.load
        X, Y, E = (sizes.get(axis, 1) for axis in "XYE")
        copies, width = self.chips / E / X / min(c.K, Y), 2 * c.K * c.H
        if c.latent:
            copies, width = self.chips / E, c.sizes["R"] + c.sizes["M"]
        more = (copies - 1) * len(c.attending) * c.D * width * dtype_bytes(self.service.weights)
        if self.form == "experts":
            more += (Y - 1) * c.matrices * c.D * c.S * (c.L - len(c.dense)) * dtype_bytes(self.service.weights)
        dense = E * (load.weights - load.experts + more)
        return replace(load, weights=dense + load.experts, lookup=E * load.lookup)

    @cached_property
    def comms(self) -> dict[str, float]:
        """Seconds of a step's collectives, by the array that they move."""
        found: dict[str, float] = {}
        for moved in decoding.collectives(self.form, self.service.config, self.batch, dict(self.sizes)):
            seconds = decoding.collective_seconds(moved, self.chip, self.shape, dict(self.sizes))
            found[moved.what] = found.get(moved.what, 0.0) + seconds
        return found

    @cached_property
    def step(self) -> serving.DecodeStep:
        """The decode step."""
        s = self.service
        comms = sum(self.comms.values())
        return serving.step(self.load, self.batch, s.seen, self.chip, self.chips, s.compute, self.copies, comms)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of a replica, by the bound."""
        return self.batch / self.step.seconds

    @property
    def per_chip(self) -> float:
        """Tokens per second and chip, by the bound."""
        return self.tokens_per_second / self.chips

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on a chip."""
        return self.load.weights / self.chips

    @property
    def kv_bytes(self) -> float:
        """Bytes of caches on a chip."""
        one, s = self.load.kv(self.service.context), self.service  # the last one grows to its end
        return self.copies * max(self.batch * self.load.kv(s.seen), one * self.groups) / self.chips

    @property
    def fits(self) -> bool:
        """Whether weights and caches fit the memory."""
        return self.weight_bytes + self.kv_bytes <= self.service.headroom * self.chip.need("hbm_bytes")

    @property
    def in_time(self) -> bool:
        """Whether the step and the forecast times keep the service's limits."""
        s = self.service
        pairs = (s.latency, lambda: self.step.seconds), (s.tpot, lambda: self.tpot)
        pairs += () if self.apart else ((s.ttft, lambda: self.ttft),)
        return all(most is None or seconds() <= most for most, seconds in pairs)

    @cached_property
    def likely(self) -> Forecast:
        """The forecast of a token's time, by kind of work."""
        return likely_token(self)

    @property
    def tpot(self) -> float:
        """Seconds of each further token, as forecast."""
        return float(self.likely.seconds)

    @cached_property
    def ttft(self) -> float:
        """Seconds to the first token where prompts run between the steps, as forecast."""
        return first_token(self)

    @property
    def requests(self) -> float:
        """Requests per second of all replicas, as forecast."""
        first = 0.0 if self.apart else self.ttft
        return self.replicas * self.batch / (first + self.service.generated * self.tpot)

    @property
    def served(self) -> float:
        """Tokens per second and chip, as forecast."""
        return self.requests / self.replicas * self.service.generated / self.chips

    @cached_property
    def prefill(self) -> float:
        """Seconds of one prompt on this slice, as forecast."""
        return prompt_run(self).taken(self.chips)

    @property
    def prefill_servers(self) -> float:
        """The number of prefill servers, on the same slice, for each generation server."""
        return serving.prefill_servers(self.prefill, self.step.seconds, self.batch, self.service.generated)

    @property
    def groups(self) -> int:
        """The number of groups of ranks that the cache's batch is split over."""
        sizes = dict(self.sizes)
        return {"heads_batch": sizes.get("Z", 1), "2d": sizes.get("X", 1)}.get(self.form, sizes.get("E", 1))

    @property
    def type(self) -> str:
        """The cache's type."""
        rows = {"heads_batch": "B_Z", "2d": "B_X"}.get(self.form, "B_E" if dict(self.sizes).get("E", 1) > 1 else "B")
        places = "S_Z" if self.form == "sequence" else "S"
        return f"KV[{rows}, {places}, M]" if self.service.config.latent else f"KV[2, {rows}, {places}, K_Y, H]"


def stored_experts(experts: int, parts: int) -> int:
    """Return how many experts are stored so that each of `parts` chips has equally many; 0 if too many are copies."""
    stored = -(-experts // parts) * parts
    return stored if stored <= COPIES * experts else 0


def meshes(chips: int, experts: int = 1) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
    """Yield (form, mesh sizes) of every form on `chips` chips, for a model of `experts` experts.

    The second axis of a form is a power of two; that of experts is any number that divides the chips. If it does not
    divide the experts, some are stored twice.
    """
    for E in divisors(chips) if experts > 1 else [1]:
        if stored_experts(experts, E):
            sizes = (("Y", chips // E), *([("E", E)] if E > 1 else []))
            yield "heads", sizes
            if chips > E and stored_experts(experts, chips):  # without Y it is the same
                yield "experts", sizes
    for form in ("heads_batch", "sequence", "2d"):
        for second in (2**i for i in range(1, chips.bit_length())):
            if chips % second == 0 and (form != "2d" or second < chips):
                yield form, (("X", second), ("Y", chips // second)) if form == "2d" else (
                    ("Y", chips // second), ("Z", second)
                )  # fmt: skip


def slice_shapes(chip: Chip, chips: int | None, most: int) -> list[tuple[int, ...]]:
    """Return the slices of exactly `chips` chips, or of up to `most` if it is None; any number of GPUs is a slice."""
    if chips and chip.kind != "tpu":
        return [(chips,)]
    return [shape for shape in serving.slices(chip, chips or most) if chips in (None, math.prod(shape))]


def replica_shapes(chip: Chip, chips: int | None, most: int, replicas: int | None) -> list[tuple[int, ...]]:
    """Return the possible slices of a replica, where `replicas` equal ones (None: any number) use `chips` together."""
    if not chips:
        return slice_shapes(chip, None, most)
    if replicas:
        return slice_shapes(chip, chips // replicas, most) if chips % replicas == 0 else []
    return [shape for count in divisors(chips) for shape in slice_shapes(chip, count, most)]


def is_legal(one: ServingPlan) -> bool:
    """Return whether the model divides over the mesh, and the mesh over the slice."""
    try:
        return one.comms is not None
    except ValueError:
        return False


def best_batch(one: ServingPlan) -> ServingPlan | None:
    """Return `one` with the batch of most tokens/s; None if not even its smallest batch fits and is fast enough.

    If the cache's batch is split, only multiples of its groups count.
    """
    s, multiple = one.service, one.groups

    def at(count: int) -> ServingPlan:
        return replace(one, batch=count * multiple)

    def last(holds, most: int) -> int:
        """Return the largest count up to `most` for which `holds` is true, or 0. It must be true for smaller ones."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    room = s.headroom * one.chips * one.chip.need("hbm_bytes") - one.load.weights
    most = max(0, math.floor(room / (one.copies * one.load.kv(s.seen) * multiple)) + 1)  # one more, as numbers round
    most -= most > 0 and not at(most).fits
    if s.latency or s.ttft or s.tpot:
        most = last(lambda count: at(count).in_time, most)
    if most == 0 or not at(most).fits:
        return None
    enough = AS_MUCH * at(most).tokens_per_second
    if most == 1 or at(most - 1).tokens_per_second < enough:
        return at(most)
    return at(1 + last(lambda count: at(count).tokens_per_second < enough, most))


def _key(served: ServingPlan, objective: str) -> tuple:
    """Return the sort key of a plan; the best comes first."""
    if objective == "latency":
        return served.step.seconds, -served.per_chip, served.chips
    if served.service.ttft or served.service.tpot:
        return -served.served, served.chips
    return -float(f"{served.per_chip:.3g}"), served.tpot * served.chips / served.batch, served.chips


def plans(
    service: Service, chip: Chip, *, chips: int | None = None, most: int = 256, form: str | None = None,
    batch: int | None = None, objective: str = "throughput", replicas: int | None = 1, apart: bool = False,
) -> list[ServingPlan]:  # fmt: skip
    """Return all plans that fit and are fast enough, the best first.

    Args:
        service: The request.
        chip: The chip.
        chips: The chips of all `replicas` together; slices of any number up to `most` if None.
        most: The chips of the largest slice that is tried.
        form: The sharding form, any if None.
        batch: The batch of a replica; the best of each if None (the smallest for latency).
        objective: The best has the most tokens/s per chip ("throughput") or the shortest step ("latency").
        replicas: The number of replicas; any number that divides the chips if None.
        apart: Whether other chips run the prompts.
    """
    found = []
    for shape in replica_shapes(chip, chips, most, replicas):
        for name, sizes in meshes(math.prod(shape), service.config.E):
            parts = dict(sizes).get("E", 1) * (dict(sizes)["Y"] if name == "experts" else 1)
            stored = stored_experts(service.config.E, parts)
            more = stored != service.config.E
            config = service.config.with_(E=stored, expert_groups=1, top_groups=1) if more else service.config
            asked = replace(service, config=config, copied=stored - service.config.E) if more else service
            count = chips // math.prod(shape) if chips else replicas or 1
            one = ServingPlan(asked, chip, shape, name, sizes, batch or 1, count, apart)
            if form not in (None, name) or not is_legal(one):
                continue
            one = one if batch else replace(one, batch=one.groups)
            if batch or objective == "latency":
                whole = one.batch % one.groups == 0
                found += [one] if whole and one.fits and one.in_time else []
            elif (suited := best_batch(one)) is not None:
                found.append(suited)
    return sorted(found, key=lambda served: _key(served, objective))
