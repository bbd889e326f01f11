"""A plan under load: random requests through the engine's own scheduler, in the times that are forecast.

    served = under_load(best, rate=2.0, policy="chunked", count=64, seed=0)       a scaling.serve.simulate.Simulated
    print(gantt(served, 40))

`scaling.serve.scheduler` decides the steps, as it does in the engine; only their times are modelled.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from scaling.cost import serving
from scaling.plan.report import several
from scaling.plan.serve.candidates import ServingPlan as Plan
from scaling.plan.serve.forecast import likely_step
from scaling.plan.serve.report import ms, per_second, short
from scaling.serve.requests import Request
from scaling.serve.simulate import Simulated, simulate
from scaling.serve.states import PREFILL, Move, Options, Run
from scaling.show.bars import Bar
from scaling.show.bars import text as text_of

PAGE = 64  # tokens
BUDGET = 512  # tokens of a step under the policy "chunked"


def modelled(plan: Plan) -> Callable[[Run | Move], float]:
    """Return a function that forecasts the seconds of an action on the plan's slice.

    All groups wait for the one that decodes most, and run prompts together. A cache moves over the datacenter's network
    of all chips, or at once if the chip's file has no such network.
    """
    step_seconds = likely_step(plan)

    def seconds(action: Run | Move) -> float:
        if isinstance(action, Move):
            return plan.load.kv(action.tokens) / (plan.chips * plan.chip.dcn_bw) if plan.chip.dcn_bw else 0.0
        prompts, decoded = 0, [[] for _ in range(plan.groups)]
        for work in action.works:
            if work.width > 1:
                prompts += work.width
            else:
                decoded[work.group].append((1, work.start + 1))
        if not (busiest := max(decoded, key=lambda rows: (len(rows), rows)) * plan.groups):
            return step_seconds(None, 0, prompts)
        step = serving.mixed(plan.load, busiest, plan.chip, plan.chips, plan.service.compute)
        return step_seconds(replace(step, kv=plan.copies * step.kv), len(busiest), prompts)

    return seconds


def under_load(plan: Plan, *, rate: float, policy: str = "chunked", count: int = 64, seed: int = 0) -> Simulated:
    """Simulate `count` requests of the service's lengths, `rate` per second; the plan's batch is the slots."""
    draw, s, now, arrivals = random.Random(seed), plan.service, 0.0, []
    for id in range(count):
        now += draw.expovariate(rate)
        arrivals.append((now, Request(id, tuple(range(id << 32, (id << 32) + s.prompt)), s.generated)))
    pages = plan.batch // plan.groups * -(-s.context // PAGE)
    options = Options(pages, PAGE, plan.batch, BUDGET + plan.batch, policy, prefix=False, groups=plan.groups)
    return simulate(arrivals, options, modelled(plan))


KINDS = {".": "waits", "d": "decodes", ">": "its cache moves", "P": "prompt"}  # the later ones lie over the others


def request_bars(served: Simulated, most: int = 16) -> list[Bar]:
    """Return the first requests in time, a row each, as bars of these kinds."""
    shown = list(served.requests.items())[:most]
    rows = {id: str(id).rjust(len(str(shown[-1][0]))) for id, _ in shown}
    drawn = [Bar(rows[id], ".", times.arrival, times.end, KINDS["."]) for id, times in shown]
    for start, end, action in served.spans:
        each = [(action.id, ">")] if isinstance(action, Move) else [
            (work.id, "P" if len(work.tokens) > 1 or action.worker == PREFILL else "d") for work in action.works
        ]  # fmt: skip
        drawn += [Bar(rows[id], letter, start, end, KINDS[letter]) for id, letter in each if id in rows]
    return sorted(drawn, key=lambda bar: [*KINDS].index(bar.label))


def gantt(served: Simulated, width: int = 80, seconds: float | None = None, most: int = 16) -> str:
    """Draw the first requests in time: `P` a prompt runs, `d` a request decodes, `.` it waits, `>` its cache moves."""
    return text_of(request_bars(served, most), width, seconds or served.seconds, idle=" ", fill="")


def text(plan: Plan, served: Simulated, rate: float, policy: str) -> str:
    """Return the text that is printed under the plan."""
    slices = "two slices, one that prefills" if policy == "disaggregated" else "one slice"
    enough, asked = math.ceil(rate / plan.requests), f"{rate:,}".removesuffix(".0")
    queue = [f"  the plan serves {plan.requests:.3g} requests a second: {enough:,} such plans would serve {asked}"]
    tokens = f"{served.throughput:,.0f}" if served.throughput >= 100 else per_second(served.throughput)
    shares = as_dict(served, rate, policy)
    waits = [
        f"{what.upper()} p50 {ms(shares[f'{what}_p50'])} ms, p95 {ms(shares[f'{what}_p95'])} ms"
        for what in ("ttft", "tpot")
        if shares[f"{what}_p50"] is not None
    ]
    return "\n".join([
        f"Simulated as forecast: {several(len(served.requests), 'request')}, {asked} a second, {policy} on {slices}",
        "; ".join([f"  {tokens} tokens/s", *waits]),
        *(queue if enough > 1 else []), "",
        f"Requests, {short(served.seconds)} s across: P prompt, d decode, . waiting", gantt(served),
    ])  # fmt: skip


def as_dict(served: Simulated, rate: float, policy: str) -> dict:
    """Return the simulation as data, in seconds and tokens/s; answers of one token have no time of further ones."""
    at = {f"{what}_p{p}": served.percentile(what, p) for what in ("ttft", "tpot") for p in (50, 95)}
    return {
        "requests": len(served.requests), "rate": rate, "policy": policy, "seconds": served.seconds,
        "steps": len(served.spans), "tokens_per_second": served.throughput,
        **{name: None if math.isnan(seconds) else seconds for name, seconds in at.items()},
    }  # fmt: skip
