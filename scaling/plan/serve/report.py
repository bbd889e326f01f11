"""The report of a serving plan: its step's costs, the cost that binds, and the changes that would help."""

from collections.abc import Sequence
from dataclasses import replace

from scaling.common.console import table
from scaling.cost import serving
from scaling.hardware import Chip
from scaling.models.leaves import counted_without
from scaling.plan.report import folded, several, size
from scaling.plan.serve.candidates import Service, ServingPlan, plans
from scaling.plan.serve.forecast import ERRORS, MEASURED
from scaling.plan.serve.goals import Deployment

CHANGE = 1.02  # a change counts if the answer is this much better or worse


def slice_name(shape: Sequence[int]) -> str:
    """Return the name of a slice, such as 4x4."""
    return "x".join(map(str, shape))


def gain(ratio: float) -> str:
    """Return a ratio as a change in percent, such as +12%, or as a multiple from 10 on."""
    if ratio >= 10:
        return f"{ratio:,.0f} times"
    return f"{ratio - 1:+.0%}" if abs(ratio - 1) >= 0.005 else "as much"


def named_slices(one: ServingPlan) -> str:
    """Return the slice of a plan, with the number of its replicas."""
    return f"{one.replicas:,} x {slice_name(one.shape)}" if one.replicas > 1 else slice_name(one.shape)


def _mesh(served: ServingPlan) -> str:
    return ", ".join(f"{axis} = {n}" for axis, n in served.sizes)


def notes(served: ServingPlan) -> list[str]:
    """Return the notes that matter when these numbers are compared with others."""
    said, s = [], served.service
    if served.chip.kind == "tpu" and served.chips > 1:
        rings = served.chip.wraps(served.shape)
        shown = "no wraparound" if not any(rings) else "wraparound" if all(rings) else "wraparound on one axis"
        said.append(f"a {slice_name(served.shape)} of {served.chip.name} has {shown}: its collectives are timed so")
    if served.copies > 1:
        why = f"K = {s.config.K} KV heads are fewer than Y" if not s.config.latent else "a latent is of all heads"
        said.append(f"the cache is stored {served.copies:g} times: {why}")
    if s.copied:
        said.append(f"{s.copied} experts are stored twice, so that each chip has equally many")
    if s.over_time:
        said.append("caches are counted at the prompt and half of the output, as they are on average")
    return said


def off_by(chip: Chip, engine: str = "") -> str:
    """Return a sentence, without its full stop, on the error of forecasts of a token, or of an engine's first one."""
    error, rows = ERRORS[engine or ("gpu" if chip.kind == "gpu" else "tpu")]
    unlike = "" if chip.name.partition(":")[0] in MEASURED else f", none of them on {chip.name}"
    return f"such forecasts are off by {error:.0%} in the median of {rows}{unlike}"


def ms(seconds: float) -> str:
    """Return seconds in milliseconds."""
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def per_second(tokens: float) -> str:
    """Return a number of tokens per second with one decimal, or with three digits if it is below 1."""
    return f"{tokens:,.1f}" if tokens >= 1 else f"{tokens:.3g}"


def short(value: float) -> str:
    """Return a number with three digits, or without decimals from a thousand on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def goals_text(goals: Sequence[Deployment]) -> str:
    """Return the deployments under limits of the first and of further tokens, the best first."""
    rows = []
    for one in goals:
        prompts = f"{one.instances} x {one.prompts.chips} chips" if one.prompts else "between steps"
        decode = f"{named_slices(one.decode)}, {one.decode.form}: {_mesh(one.decode)}"
        times = ms(one.ttft), ms(one.tpot), per_second(one.requests), per_second(one.per_chip)
        rows.append((prompts, decode, f"{one.decode.batch:,}", one.chips, *times))
    head = ["prompts", "decoding", "batch", "chips", "TTFT ms", "TPOT ms", "requests/s", "tokens/s\na chip"]
    if not goals:
        return ""
    below = "What follows describes the one whose prompts run between steps.\n\n" if goals[0].prompts else ""
    return "In time, as forecast, the best first:\n" + table(rows, head) + "\n\n" + below


def goal_dict(one: Deployment) -> dict:
    """Return a deployment as data, in seconds."""
    return {
        "prompts": {"instances": one.instances, "chips": one.prompts.chips} if one.prompts else None,
        "decode": as_dict(one.decode), "chips": one.chips, "ttft": one.ttft, "tpot": one.tpot,
        "requests_per_second": one.requests, "tokens_per_second_per_chip": one.per_chip,
    }  # fmt: skip


def compute_bound_from(served: ServingPlan) -> float:
    """Return the batch from which the FLOPs of the matmuls take longer than reading their weights."""
    one = served.step
    return served.batch * one.weights / one.math


def _changes(best: ServingPlan, **fixed) -> list[tuple[str, ServingPlan]]:
    """Return other requests whose best plan differs: smaller dtypes, half the context, twice or half the chips."""
    s = best.service
    smaller = {"bf16": "int8", "fp8": "int4", "int8": "int4"}
    tried: list[tuple[str, Service, dict]] = []
    if s.kv in smaller:
        tried.append((f"KV cache in {smaller[s.kv]}", replace(s, kv=smaller[s.kv]), fixed))
    if s.weights in smaller:
        tried.append((f"weights in {smaller[s.weights]}", replace(s, weights=smaller[s.weights]), fixed))
    if s.context // 2 > s.generated:
        tried.append((f"a context of {s.context // 2:,}", replace(s, context=s.context // 2), fixed))
    for chips in (best.chips * 2, best.chips // 2):
        tried.append((several(chips, "chip"), s, fixed | {"chips": chips}))
    if s.latency:
        tried.append((f"{2e3 * s.latency:g} ms a step", replace(s, latency=2 * s.latency), fixed))
    found, count = [], best.chips * best.replicas
    if fixed.get("chips") and count > 2:  # a number that divides badly
        less: dict = fixed | {"chips": count - 1}
        fewer = plans(s, best.chip, **less)[:1]
        more = CHANGE * best.tokens_per_second * best.replicas
        found += [
            (f"only {count - 1} of the chips", one) for one in fewer if one.tokens_per_second * one.replicas > more
        ]
    for what, service, how in tried:
        if how.get("chips") != 0 and (again := plans(service, best.chip, **how)):
            ratio = again[0].per_chip / best.per_chip
            if not 1 / CHANGE < ratio < CHANGE or not 1 / CHANGE < again[0].step.seconds / best.step.seconds < CHANGE:
                found.append((what, again[0]))
    return found


def plan_table(found: Sequence[ServingPlan], dollars: float | None, names: Sequence[str] = ()) -> str:
    """Return a table of plans as forecast, with the price of a million tokens; `names` begin the rows."""
    head = ["slice", "form", "mesh", "batch", "TTFT ms", "TPOT ms", "tokens/s\na chip", "$ a million\ntokens"]
    body = []
    for one in found:
        row = [named_slices(one), one.form, _mesh(one), f"{one.batch:,}", ms(one.ttft), ms(one.tpot)]
        body.append([*row, per_second(one.served), short(dollars * 1e6 / 3600 / one.served) if dollars else ""])
    if names:
        head, body = ["", *head], [[name, *row] for name, row in zip(names, body, strict=True)]
    return table([row[: None if dollars else -1] for row in body], head[: None if dollars else -1])


def recommended(found: Sequence[ServingPlan], batch: int | None) -> ServingPlan:
    """Return the plan to take: the balanced one where neither a limit of time nor a batch is given, else the first."""
    s = found[0].service
    return found[0] if s.latency or s.ttft or s.tpot or batch else tradeoff(found)["balanced"]


def others_than(best: ServingPlan, found: Sequence[ServingPlan], most: int) -> list[ServingPlan]:
    """Return the best plans of each slice and form, other than `best`'s own."""
    kept = {(best.shape, best.form): best}
    for one in found:
        kept.setdefault((one.shape, one.form), one)
    return list(kept.values())[1 : most + 1]


def text(found: Sequence[ServingPlan], best: ServingPlan, top: int, price: float | None, **fixed) -> str:
    """Return the report on `best`, and on the first of the plans `found` if that is another one."""
    used = best.chips * best.replicas
    s, step, hbm, gpu = best.service, best.step, best.chip.need("hbm_bytes"), best.chip.kind == "gpu"
    parts = {"KV cache": step.kv, "weights": step.weights, "FLOPs": step.math, "collectives": step.comms}
    kv, weights, math, comms = (f"{what} {1e3 * seconds:.3g}" for what, seconds in parts.items())
    dollars, likely = price or best.chip.price, best.likely
    place = "" if gpu and best.replicas == 1 else f"{named_slices(best)}, "
    spent = ", ".join(f"{name} {ms(part)}" for name, part in likely.parts.items() if part)
    within = f", {1e3 * s.latency:g} ms a step at most" if s.latency else ""
    asked = f"{s.config.name} on {best.chip.name}: weights {s.weights}, KV cache {s.kv}, FLOPs in {s.compute}; context "
    asked += f"{s.context:,} ({s.prompt:,} + {s.generated:,}){within}"
    lines = [asked, *counted_without(s.config), ""]
    if best != found[0]:
        lines += ["Latency against throughput, as forecast (balanced: the fastest at half of the most tokens/s):"]
        names: dict[ServingPlan, list[str]] = {}
        for name, one in tradeoff(found).items():
            names.setdefault(one, []).append(name)
        lines += [
            plan_table([*names], dollars, [", ".join(some) for some in names.values()]),
            "--tpot and --ttft set limits, in ms. What follows describes the balanced plan.",
            "",
        ]
    lines += [
        f"Take:       {place}{several(used, 'chip')}, form {best.form}: {best.type} on "
        f"{_mesh(best)}; batch {best.batch:,}",
        f"Step:       {1e3 * step.seconds:.3g} ms at least: {kv} + the longest of {weights}, {math}, {comms}; "
        f"{1e3 * step.apart:.3g} ms if no collective is hidden",
        f"Forecast:   {ms(likely.seconds)} ms a token of each request, {per_second(best.served)} tokens/s a chip: "
        f"{spent} ms",
        f"            {off_by(best.chip)}",
        f"First token: {ms(best.ttft)} ms, as forecast; "
        + (
            off_by(best.chip, s.engine) if gpu else f"at {s.mfu:.0%} MFU, and no measured row tells how far off that is"
        ),
        f"Throughput: {best.tokens_per_second * best.replicas:,.0f} tokens/s by the bound of decoding, "
        f"{per_second(best.per_chip)} a chip, {1 / step.seconds:,.1f} for each request"
        + (f"; ${short(dollars * 1e6 / 3600 / best.per_chip)} a million tokens" if dollars else ""),
        f"Memory:     weights {size(best.weight_bytes)}, KV cache {size(best.kv_bytes)} a chip, of "
        f"{size(s.headroom * hbm)} ({s.headroom:.0%} of {size(hbm)})",
        f"Binds:      {step.bound}; the matmuls are compute-bound from a batch of {compute_bound_from(best):,.0f}. HBM "
        f"is busy {min(1.0, (step.kv + step.weights) / step.seconds):.0%} of the step, with weights alone "
        f"{step.weights / step.seconds:.0%}",
        f"Prefill:    {best.prefill:.3g} s for {several(s.prompt, 'token')} on as many chips: "
        f"{short(best.prefill_servers)} prefill servers for each that generates {several(s.generated, 'token')} a "
        "request",
        *(f"Note:       {note}." for note in notes(best)),
    ]
    if others := others_than(best, found, top):
        lines += ["", "Others, as forecast:", plan_table(others, dollars)]
    if changed := _changes(found[0], **fixed):
        most = f"the most tokens/s by the bound, {per_second(found[0].per_chip)} a chip" if best != found[0] else "it"
        lines += ["", f"What would change {most}:"]
        lines += [
            f"  {what}: {named_slices(one)}, {one.form}, batch {one.batch:,}, {1e3 * one.step.seconds:.3g} ms, "
            f"{per_second(one.per_chip)} tokens/s a chip ({gain(one.per_chip / found[0].per_chip)})"
            for what, one in changed
        ]  # fmt: skip
    return folded(lines)


def front(found: Sequence[ServingPlan]) -> list[ServingPlan]:
    """Return the plans that no other beats in both the time of a token and tokens/s per chip, as forecast.

    Each plan of `found` is tried with its own batch and with a half, a quarter and so on of it. The fastest token comes
    first.
    """
    smaller = [
        replace(one, batch=one.groups * (one.batch // one.groups >> i))
        for one in found for i in range((one.batch // one.groups).bit_length())
    ]  # fmt: skip
    return serving.pareto(smaller, lambda one: one.tpot, lambda one: one.served)


def tradeoff(found: Sequence[ServingPlan]) -> dict[str, ServingPlan]:
    """Return both ends of the front, and the fastest token at half of the most tokens/s."""
    kept = front(found)
    balanced = next(one for one in kept if 2 * one.served >= kept[-1].served)
    return {"fastest token": kept[0], "balanced": balanced, "most tokens/s": kept[-1]}


def as_dict(one: ServingPlan) -> dict:
    """Return a plan as data, in seconds, bytes of a chip, and tokens/s."""
    step = one.step
    return {
        "slice": slice_name(one.shape), "chips": one.chips, "form": one.form, "type": one.type, "mesh": dict(one.sizes),
        "batch": one.batch, "replicas": one.replicas, "forecast_seconds": one.tpot,
        "forecast": one.likely.parts, "first_token_seconds": one.ttft,
        "step_seconds": step.seconds, "step_seconds_unhidden": step.apart,
        "parts": {"kv": step.kv, "weights": step.weights, "flops": step.math, "collectives": step.comms},
        "collectives": one.comms, "binds": step.bound, "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_chip": one.per_chip, "weight_bytes": one.weight_bytes, "kv_bytes": one.kv_bytes,
        "kv_copies": one.copies, "compute_bound_from": compute_bound_from(one), "prefill_seconds": one.prefill,
        "prefill_servers": one.prefill_servers, "notes": notes(one),
    }  # fmt: skip
