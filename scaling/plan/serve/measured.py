"""Fit the rates of serving to measured rows: `python -m scaling.plan serve measured silicon_sample.csv`.

The file is systems/silicon_sample.csv of github.com/ai-dynamo/aiconfigurator (Apache-2.0, 2026), or a part of it. Each
forecast is judged by rows that it is not fitted to. The rows are divided by each of LEFT_OUT: one model's rows, for
instance, are forecast by the rates that fit the rows of all other models. The last lines printed are rates.toml, fitted
to all rows.

Left out are other models than MODELS, repeated rows, rows whose caches do not fit, and prompts that ran on other chips.
A row's columns say nothing of how its engine was launched, and the time to the first token depends on it. Rates.toml
has the waits that public scripts set. What is left contradicts itself. In 33 pairs of SGLang's rows of DeepSeek in FP4
on B200s, experts that are split over all chips differ from whole experts on each chip: by a factor of 1.2 in the median
in a token's time, and of 12 in the time to the first one. All requests of Qwen3-32B seem to come at once in SGLang's
rows, and in no other engine's. Without these, DeepSeek on B300s and Llama-3.1-8B, SGLang's other 298 rows are forecast
within 17% in the median where deployments are left out, and no group of ten is beyond 60%.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scaling.common import console
from scaling.common.console import Parser, complaining
from scaling.configs import get
from scaling.hardware import chip
from scaling.plan.published import median
from scaling.plan.serve import forecast
from scaling.plan.serve.candidates import Service, ServingPlan
from scaling.plan.serve.forecast import ENGINES, GPU, TABLE, EngineRates, Rates

MODELS = TABLE["models"]
# The search for an engine's rates begins with these.
START = EngineRates(layer=1e-3, queue=0.08, steps=3.0, wait=0.6, burst=0.01, latent=2.0, dense=1.5, moe=3.0, fp4=1.5)
KERNELS = [*TABLE["kernels"]]  # fitted to vLLM's rows; the multiples of a prompt's time at the peak are at least 1
ROUNDS, WIDEST, LEAST = 40, 0.7, 2e-3  # of the search for rates: its rounds, and its steps in log(rate)
UNLIKE = 0.25  # an error of a first token of this size counts half: larger ones are more often of unlike launches
MANY, FAR = 10, 0.6  # groups of as many rows, and the error beyond which they are counted
LEFT_OUT = "deployment", "model", "chip", "dtype", "engine"  # the parts that a fit leaves out, and then forecasts
TENTHS = 10  # the parts into which deployments (model, chip, count and dtype) are divided


@dataclass(frozen=True)
class MeasuredRow:
    """A measured row: the plan, and the seconds to the first token and of each further one.

    `experts`: the chips among which whole experts are divided.
    """

    plan: ServingPlan
    experts: int
    first: float
    token: float

    @property
    def labels(self) -> dict[str, object]:
        """The values of LEFT_OUT."""
        p, s = self.plan, self.plan.service
        return {
            "deployment": (s.config.name, p.chip.name, p.chips, s.weights), "model": s.config.name,
            "chip": p.chip.name, "dtype": s.weights, "engine": s.engine,
        }  # fmt: skip

    @property
    def group(self) -> tuple:
        """The deployment, the engine and the layout; rows of one group agree in all of them."""
        return self.labels["deployment"], self.plan.service.engine, self.plan.sizes, self.experts


def measured_rows(path: Path) -> Iterator[MeasuredRow]:
    """Yield the rows of a file.

    Some rows use the same chips for tensor and for expert parallelism, and list the product of both sizes as TP. A
    row's batch counts the requests of one replica of attention.
    """
    if not path.is_file():
        fix = "give systems/silicon_sample.csv of github.com/ai-dynamo/aiconfigurator, or a part of it"
        raise ValueError(f"{path}: is not a file\n  fix: {fix}")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    seen, table = set(), csv.DictReader(lines)
    if missing := {"model_path", "silicon_ttft_ms", "silicon_tpot_ms"} - set(table.fieldnames or ()):
        raise ValueError(f"{path} has no column {min(missing)}\n  fix: give aiconfigurator's silicon_sample.csv")
    for row in table:
        n = {name: int(text or 1) for name, text in row.items() if name.endswith(("_size", "isl", "osl"))}
        name = row["model_path"].partition("/")[2].removesuffix("-NVFP4").removesuffix("-FP8")
        if name not in MODELS or row["backend"] not in ENGINES:
            continue
        on, dtype = chip(row["system"].partition("_")[0]), row["precision"] or "bf16"
        split, replicas = n["moe_tp_size"], n["attention_dp_size"]
        chips = split if split == n["moe_ep_size"] > 1 else max(n["tp_size"], replicas)
        sizes = (("Y", 1), ("E", chips)) if replicas > 1 else (("Y", chips),)
        compute = dtype if dtype in dict(on.peaks) and dtype != "int4" else "bf16"
        kv = "fp8" if dtype in ("fp8", "fp4") and row["backend"] != "sglang" else "bf16"  # SGLang's default
        service = Service(
            get(MODELS[name]), n["isl"] + n["osl"], n["osl"], dtype, kv, compute, over_time=True, engine=row["backend"]
        )  # fmt: skip
        batch = n["batch_size"] * replicas
        batch = max(1, round(batch / chips)) * chips if replicas > 1 else batch
        plan = launched(ServingPlan(service, on, (chips,), "heads", sizes, batch))
        elsewhere = row["backend"] == "trtllm" and row["system"] == "gb200"  # prompts ran on other chips
        times = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
        found = MeasuredRow(plan, min(n["moe_ep_size"], chips), *times)
        if plan.fits and not elsewhere and found not in seen:
            seen.add(found)
            yield found


def launched(plan: ServingPlan) -> ServingPlan:
    """Return the plan with the decode steps that its engine was set to wait, by the launches of rates.toml."""
    s = plan.service
    facts = {"engine": s.engine, "model": s.config.name, "chip": plan.chip.name, "chips": plan.chips}
    facts |= {"weights": s.weights, "prompt": s.prompt, "output": s.generated, "replicas": plan.groups}
    for launch in TABLE["launches"]:
        if all(facts[name] in values for name, values in launch["of"].items()):
            steps = launch["few"] if plan.batch < launch.get("from", 0) else launch["steps"]
            return replace(plan, service=replace(s, wait=steps))
    return plan


def stacked_work(works: Sequence) -> Any:
    """Return the works of many rows as one, of arrays."""
    return type(works[0])(*(np.array(column, float) for column in zip(*map(astuple, works), strict=True)))


def fit_rates(kind: Callable, start: dict, seconds: Callable, measured: np.ndarray, weights: np.ndarray) -> dict:
    """Return the rates that minimize the mean of |log(forecast / measured)|, one rate at a time; zeros stay."""
    rates, step = dict(start), {name: WIDEST for name, rate in start.items() if rate}

    def loss(tried: dict) -> float:
        errors = np.abs(np.log(seconds(kind(**tried)) / measured))
        errors = errors / (1 + errors / UNLIKE) if kind is not Rates else errors
        return float(np.average(errors, weights=weights))

    best = loss(rates)
    for _ in range(ROUNDS):
        for name in step:
            least = 1.0 if name in KERNELS else 0.0
            tries = [rates | {name: max(least, rates[name] * math.exp(sign * step[name]))} for sign in (1, -1)]
            found = next((tried for tried in tries if loss(tried) < best - 1e-9), None)
            step[name] *= 1.5 if found else 0.5
            rates, best = (found, loss(found)) if found else (rates, best)
        if max(step.values()) < LEAST:
            break
    return rates


@dataclass(frozen=True)
class Fit:
    """Rates fitted to rows; `errors` are log(forecast / measured) of the rows forecast by rates fitted without them.

    The keys of `errors` are the entries of LEFT_OUT that divide the rows.
    """

    name: str
    rates: dict[str, float]
    errors: dict[str, np.ndarray]
    groups: tuple[tuple, ...]

    @property
    def error(self) -> float:
        """The median error where whole deployments are left out."""
        return median(self.errors["deployment"])

    @property
    def far(self) -> tuple[int, int]:
        """Two counts of the groups of at least MANY rows: the ones off by more than FAR in the median, and all."""
        large = [group for group, count in Counter(self.groups).items() if count >= MANY]
        errors = (self.errors["deployment"][[one == group for one in self.groups]] for group in large)
        return sum(median(some) > FAR for some in errors), len(large)


def left_out(rows: Sequence[MeasuredRow], what: str) -> list[np.ndarray]:
    """Return masks of the rows to leave out together, such as one model's or a tenth of the deployments'."""
    labels = [str(row.labels[what]) for row in rows]
    names = sorted(set(labels))
    number = {name: i % TENTHS if what == "deployment" else i for i, name in enumerate(names)}
    each = np.array([number[label] for label in labels])
    return [each == i for i in range(max(each) + 1)]


def fit_without(
    name: str, kind: Callable, start: dict, rows: Sequence[MeasuredRow], seconds: Callable, measured: Callable
) -> Fit:
    """Fit rates to all rows, and test them: forecast each part of the rows by rates that were fitted to the others.

    `seconds(rows)` returns a function from rates to each row's forecast seconds; `measured(row)` returns the measured.
    """
    groups, times = tuple(row.group for row in rows), np.array([measured(row) for row in rows])
    weights = np.array([Counter(groups)[group] ** -0.5 for group in groups])  # a group counts as the root of its rows

    def of(chosen: np.ndarray) -> tuple:
        some = [row for row, kept in zip(rows, chosen, strict=True) if kept]
        return seconds(some), times[chosen], weights[chosen]

    rates, errors = fit_rates(kind, start, *of(times > 0)), {}
    for what in LEFT_OUT:
        parts = left_out(rows, what)
        if len(parts) > 1:
            errors[what] = np.zeros(len(rows))
            for out in parts:
                forecast_of, taken, _ = of(out)
                errors[what][out] = np.log(forecast_of(kind(**fit_rates(kind, rates, *of(~out)))) / taken)
    return Fit(name, rates, errors, groups)


def token_seconds(rows: Sequence[MeasuredRow]) -> Callable[[Rates], np.ndarray]:
    """Return a function that takes rates and returns the forecast seconds of a token in each row."""
    work = stacked_work([forecast.token_work(row.plan) for row in rows])
    return lambda rates: rates.token(work).seconds


def first_seconds(rows: Sequence[MeasuredRow]) -> Callable[[EngineRates], np.ndarray]:
    """Return a function that takes an engine's rates and returns each row's forecast seconds to the first token."""
    work = stacked_work([forecast.first_work(row.plan) for row in rows])
    return lambda engine: engine.first(work)


def fits(rows: Sequence[MeasuredRow]) -> list[Fit]:
    """Return the fits of a token's time, and of the time to the first one in each engine; vLLM's has the kernels'."""
    found = [fit_without("gpu", Rates, asdict(GPU), rows, token_seconds, lambda row: row.token)]
    kernels = TABLE["kernels"]
    for name, rates in TABLE["engines"].items():
        own = [row for row in rows if row.plan.service.engine == name]
        start = {key: getattr(START, key) if rate else 0.0 for key, rate in rates.items()}
        kind = EngineRates if name == "vllm" else partial(EngineRates, **kernels)
        start |= {key: getattr(START, key) for key in KERNELS if name == "vllm"}
        found += [fit_without(name, kind, start, own, first_seconds, lambda row: row.first)] if own else []
        kernels = {key: found[-1].rates.get(key, rate) for key, rate in kernels.items()}
    return found


@complaining(ValueError, OSError, code=2)
def main(arguments: list[str]) -> int:
    """Print the errors of the forecasts, and the rates that fit all rows."""
    parser = Parser(prog="python -m scaling.plan serve measured", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="silicon_sample.csv of github.com/ai-dynamo/aiconfigurator")
    found = fits(list(measured_rows(parser.parse_args(arguments).file)))
    body = [
        (one.name, f"{len(one.groups):,}",
         *(f"{median(one.errors[what]):.0%}" if what in one.errors else "" for what in LEFT_OUT),
         "{} of {}".format(*one.far)) for one in found
    ]  # fmt: skip
    head = ["", "rows", *LEFT_OUT, f"groups of {MANY}\nbeyond {FAR:.0%}"]
    print("Median errors of rows whose kind is left out of the fit:\n" + console.table(body, head) + "\n")
    print("[errors]", *(f'{one.name} = [{one.error:.2f}, "{len(one.groups):,} rows"]' for one in found), "", sep="\n")
    for one in found:
        fields = {name: f"{name} = {rate:.3g}" for name, rate in one.rates.items()}
        kernels = [fields.pop(name) for name in KERNELS if name in fields]
        print(*(["[kernels]", *kernels, ""] if kernels else []), sep="\n")
        print(f"[{'' if one.name == 'gpu' else 'engines.'}{one.name}]", *fields.values(), "", sep="\n")
    return 0
