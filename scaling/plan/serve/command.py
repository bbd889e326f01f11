"""Plan how to serve a model: `python -m scaling.plan serve --model llama3-70b --chip v5e --context 8192`."""

import json
import math
import sys
from dataclasses import replace

from scaling.common.console import Parser, chip_count, complain, complaining, integer, number, whole_count
from scaling.configs import get
from scaling.configs.sources import HELP
from scaling.cost import decoding, serving
from scaling.cost.memory import ROOM
from scaling.hardware import CHIPS, chip
from scaling.models.leaves import uncomputed
from scaling.plan.serve import measured, published, report, traces
from scaling.plan.serve.candidates import Service, plans, replica_shapes
from scaling.plan.serve.forecast import ENGINES
from scaling.plan.serve.goals import deployments
from scaling.serve.states import POLICIES
from scaling.spec import ShardingError, dtype_bytes

STORED = ("bf16", "int8", "fp8", "int4", "fp4")
MOST = 256  # chips of the largest slice that is tried if no number is given
CONTEXT = 8192  # tokens of a sequence if no length is given


def _parser() -> Parser:
    parser = Parser(
        prog="python -m scaling.plan serve",
        description="Choose the slice, sharding form and batch to serve a model with, and say why (Parts 7 and 8)",
        epilog="Examples:\n\n"
        "    python -m scaling.plan serve --model llama3-70b --chip v5e --chips 256 --context 8192\n"
        "    python -m scaling.plan serve --model llama3-70b --chip h100 --chips 32 --prompt 2000 --output 500 "
        "--weights fp8 --kv fp8 --compute fp8 --ttft 500 --tpot 30\n\n"
        "Published serving figures beside these bounds: python -m scaling.plan serve published\n\n"
        "The errors of forecasts, and their rates fitted again: python -m scaling.plan serve measured FILE\n\n"
        "Exit status: 0, a plan was found; 1, nothing fits or is fast enough; 2, an argument is wrong.",
    )
    parser.add_argument("--model", required=True, help=HELP)
    parser.add_argument("--chip", "--gpu", required=True, help=CHIPS)
    parser.add_argument(
        "--chips", "--gpus", type=chip_count, help="number of chips, of all replicas together (default: any)"
    )
    parser.add_argument(
        "--replicas", type=integer(1), help="number of instances that share the chips (default: the best)"
    )
    parser.add_argument(
        "--context", type=whole_count, help=f"tokens per sequence, prompt and output (default: their sum, or {CONTEXT})"
    )
    parser.add_argument("--prompt", type=whole_count, help="tokens of the prompt (default: context minus output)")
    parser.add_argument("--output", type=whole_count, default=512, help="tokens generated per request (default 512)")
    parser.add_argument("--weights", choices=STORED, default="int8", help="dtype of the weights (default int8)")
    parser.add_argument("--kv", choices=STORED, default="int8", help="dtype of the KV cache (default int8)")
    parser.add_argument("--compute", default="bf16", help="dtype of the matmuls (default bf16)")
    parser.add_argument("--batch", type=whole_count, help="sequences at once (default: the best)")
    parser.add_argument("--latency", type=number(1e-6), help="the most ms per step by the bound")
    parser.add_argument("--ttft", type=number(1e-6), help="the most ms to the first token, as forecast")
    parser.add_argument("--tpot", type=number(1e-6), help="the most ms of each further token, as forecast")
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="whose rates forecast the first token")
    parser.add_argument(
        "--wait", type=integer(), default=0, help="decode steps that the engine waits before it runs prompts "
        "(SGLang's --scheduler-recv-interval, TensorRT-LLM's batch_wait_timeout_iters; default 0)",
    )  # fmt: skip
    parser.add_argument("--form", choices=decoding.FORMS, help="sharding form of the step (default: the best)")
    parser.add_argument(
        "--headroom", type=number(1e-6, 1), default=ROOM, help=f"fraction of the memory to plan with (default {ROOM})"
    )
    parser.add_argument(
        "--mfu", type=number(1e-6, 1), default=0.4, help="model FLOPs utilization of prefill on TPUs (default 0.4)"
    )
    parser.add_argument("--price", type=number(1e-6), help="dollars per chip-hour (default: the book's, if it has one)")
    parser.add_argument("--top", type=integer(), default=5, help="how many other plans to show (default 5)")
    parser.add_argument("--rate", type=number(1e-6), help="also simulate requests that arrive at this rate, per second")
    parser.add_argument(
        "--policy", choices=POLICIES, default="chunked", help="batching policy of the simulation (default chunked)"
    )
    parser.add_argument(
        "--requests", type=integer(1, 10_000), default=64, help="number of requests to simulate (default 64)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def service(args) -> Service:
    """Return the request; ValueError if its lengths contradict each other."""
    total = args.prompt + args.output if args.prompt else None
    if args.context and total and args.context != total:
        raise ValueError(
            f"--context {args.context} is not --prompt {args.prompt} + --output {args.output}"
            "\n  fix: leave one of the three out"
        )
    context = args.context or total or max(CONTEXT, 2 * args.output)
    latency, ttft, tpot = (most and most / 1e3 for most in (args.latency, args.ttft, args.tpot))
    return Service(
        get(args.model), context, args.output, args.weights, args.kv, args.compute, latency, args.headroom, args.mfu,
        True, ttft, tpot, args.engine, wait=args.wait,
    )  # fmt: skip


def nothing(asked: Service, hardware, fixed: dict) -> str:
    """Return why nothing is found: no such slice, a model that does not divide, too little memory, or too slow."""
    shapes = replica_shapes(hardware, fixed["chips"], fixed["most"], fixed["replicas"])
    counts = ", ".join(str(math.prod(shape)) for shape in serving.slices(hardware))
    if not shapes:
        if hardware.kind != "tpu" and fixed["replicas"]:
            return f"{fixed['chips']} chips are not {fixed['replicas']} equal replicas\n  fix: choose a divisor of them"
        what = f"no slice of {fixed['chips']} chips" + f" over {fixed['replicas']} replicas" * bool(fixed["replicas"])
        return f"{hardware.name} has {what}\n  fix: choose one of {counts} for each"
    if whole := fixed["chips"] in map(math.prod, shapes):
        try:
            decoding.check_form(fixed["form"] or "heads", asked.config, {"Y": fixed["chips"]})
        except ShardingError as error:
            return str(error)
    patient = plans(replace(asked, latency=None, ttft=None, tpot=None), hardware, objective="latency", **fixed)
    if patient:
        best = patient[0]
        if asked.ttft or asked.tpot:
            first, token = min(one.ttft for one in patient), min(one.tpot for one in patient)
            return (
                f"nothing is fast enough: the shortest forecasts are {1e3 * first:.3g} ms to the first token and "
                f"{1e3 * token:.3g} ms a further one\n"
                "  fix: give --ttft or --tpot more, more chips, a shorter prompt or smaller dtypes"
            )
        return (
            f"nothing is fast enough: the fastest step is {1e3 * best.step.seconds:.3g} ms, on "
            f"{report.slice_name(best.shape)} by {best.form}, bound by {best.step.bound}\n  fix: give --latency "
            f"{1e3 * best.step.seconds * 1.01:.3g} or more, or smaller dtypes"
        )
    room = asked.headroom * hardware.need("hbm_bytes")
    need = asked.load.weights + (fixed.get("batch") or 1) * asked.load.kv(asked.context)
    slices, change = "", "use more chips"
    if fixed["chips"] and not whole:
        slices = f"; {fixed['chips']} are no slice of {hardware.name}, but {counts} are"
        enough = next(
            (str(math.prod(shape)) for shape in serving.slices(hardware) if room * math.prod(shape) >= need), ""
        )
        change = f"give --chips {enough}" if enough else change
    smaller = [{"weights": name} for name in ("fp8", "int4") if dtype_bytes(name) < dtype_bytes(asked.weights)]
    less = [one for one in smaller if plans(replace(asked, **one), hardware, objective="latency", **fixed)]
    fits = f"give --weights {less[0]['weights']}, which fits, or " if less else ""
    return (
        f"nothing fits: weights and caches are {need / 1e9:,.1f} GB, at least {-(-need // room):,.0f} chips of "
        f"{room / 1e9:,.1f} GB{slices}\n"
        f"  fix: {fits}{change}, smaller dtypes, a shorter context or a smaller batch"
    )


@complaining(ValueError, OSError, code=2)
def main(arguments: list[str]) -> int:
    """Plan how to serve a model, or print the published figures; return the exit status."""
    others = {"published": published.main, "measured": measured.main}
    if arguments and (other := others.get(arguments[0])):
        return other(arguments[1:])
    args = _parser().parse_args(arguments)
    asked, hardware = service(args), chip(args.chip)
    hardware.flops(asked.compute)
    fixed = {"chips": args.chips, "most": max(MOST, args.chips or 1), "form": args.form, "batch": args.batch}
    fixed["replicas"] = args.replicas
    found = plans(asked, hardware, **fixed)
    if waiting := args.batch if args.batch and not found else 0:  # the requests that do not fit wait in a queue
        fixed["batch"] = None
        found = [one for one in plans(asked, hardware, **fixed) if one.batch < waiting]
    goals = []
    if (asked.ttft or asked.tpot) and not args.batch:
        room = {"chips": args.chips, "most": fixed["most"], "form": args.form}
        goals = deployments(asked, hardware, found, **room)
        found = found or [one.decode for one in goals]
    if not found:
        why = nothing(asked, hardware, fixed)
        print(json.dumps({"error": why}), file=sys.stderr) if args.json else complain(f"no plan: {why}")
        return 1
    served, best = None, report.recommended(found, args.batch)
    if args.rate:
        served = traces.under_load(best, rate=args.rate, policy=args.policy, count=args.requests)
    if args.json:
        out = {
            "model": asked.config.name,
            "uncomputed": uncomputed(asked.config),
            "chip": hardware.name,
            "context": asked.context,
            "output": asked.generated,
        }
        out |= {"weights": asked.weights, "kv": asked.kv, "compute": asked.compute, "best": report.as_dict(best)}
        out["others"] = [report.as_dict(one) for one in report.others_than(best, found, args.top)]
        out |= {"goals": [report.goal_dict(one) for one in goals]} if goals else {}
        out |= {"waiting": waiting - found[0].batch} if waiting else {}
        out["tradeoff"] = {name: report.as_dict(one) for name, one in report.tradeoff(found).items()}
        out |= {"simulated": traces.as_dict(served, args.rate, args.policy)} if served else {}
        print(json.dumps(out, indent=1))
        return 0
    if waiting:
        print(f"Of {waiting:,} requests {found[0].batch:,} fit at once in each replica; the others wait.\n")
    if not args.context and not args.prompt:
        print(f"Counted with {asked.context:,} tokens a sequence; give --context, or --prompt and --output.\n")
    print(report.goals_text(goals) + report.text(found, best, args.top, args.price, **fixed))
    if served:
        print("\n" + traces.text(best, served, args.rate, args.policy))
    return 0
