"""What a box with 1 to 8 GPUs says of this project: equalities, speed beside PyTorch's own, memory, a trace.

    python tests/benchmarks/gpu.py
    python tests/benchmarks/gpu.py --short
    python tests/benchmarks/gpu.py --only train,decode --out results
    python tests/benchmarks/gpu.py --device cpu --ranks 2

All GPUs take part, for about ten minutes; on a CPU every part runs at a tiny size, over gloo. It runs from a checkout
and needs torch, numpy and optree. Each part runs in a process of its own, those of several ranks under torchrun, and
has a limit of time. A case that raises, crashes or hangs is named with the end of what it said, and the part goes on
after it. Written are gpu.json (every figure), gpu.md (tables for docs/speed.md) and trace.json (for ui.perfetto.dev).
Exit code 1: there were failures. The last line of the output is JSON: the decode and training steps in few words.

    rates      products and copies of the device: what shares are taken of
    nccl       torch's calls below collectives, by NCCL on one rank
    shared     as `equal`, on four ranks that share the first device
    equal      collectives, their derivatives, strategies: as one device
    train      a Transformer's step beside the same nn.Module, as MFU
    decode     prefill and decode, eager, compiled and captured, beside transformers if that is there
    attention  the kernels of dot-product attention
    beside     strategies on all ranks beside PyTorch's
    trace      a profile of a step
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

ALONE, ALL = 1, 0  # ranks of a part: one, or as many as there are


@dataclass(frozen=True)
class Part:
    """`module`: has `cases_NAME(device, tiny) -> {name: call}`; each call gives rows of a table. `ranks`: ALONE, ALL or
    their number; `seconds`: its limit."""

    module: str
    ranks: int
    seconds: int


PARTS = {
    "rates": Part("gpu_speed", ALONE, 60),
    "nccl": Part("gpu_equal", ALONE, 60),
    "shared": Part("gpu_equal", 4, 120),
    "equal": Part("gpu_equal", ALL, 120),
    "train": Part("gpu_speed", ALONE, 300),
    "decode": Part("gpu_speed", ALONE, 120),
    "attention": Part("gpu_speed", ALONE, 60),
    "beside": Part("gpu_speed", ALL, 300),
    "trace": Part("gpu_speed", ALL, 60),
}
MINUTES = 10  # of all parts together
SHORT = 3, ["rates", "decode", "train"]  # minutes and parts of --short
SAID = 12  # lines of what a process said last that are kept of a failure


def run_part(name: str, module: str, device: str, report: str, left_out: list[str], limit: float) -> None:
    """In a process of its own, each case of a part, noted in `report` when it begins and when it has ended on all
    ranks, one line of JSON each.

    A case that hangs ends the process after `limit` seconds; where it hung, or crashed, stands in report.stack. A rank
    that raises notes so: if it does so alone, the others wait for it until their collective's timeout ends them.
    """
    import torch
    import torch.distributed as dist

    from scaling.common.torchrun import this_rank
    from scaling.launch.ranks import end_with_parent

    end_with_parent(os.getppid())
    torch.set_num_threads(1)
    rank, size, local_rank, *_ = this_rank()
    several = size > 1
    if device == "cuda":  # now, so that every count of memory is the GPU's
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        torch.cuda.init()

    def note(**what):
        with open(report, "a") as file:
            file.write(json.dumps(what, default=str) + "\n")

    with open(f"{report}.stack{rank}", "w") as stack:
        faulthandler.enable(stack)
        cases: dict[str, Callable] = getattr(importlib.import_module(module), f"cases_{name}")(device, device == "cpu")
        for case in [case for case in cases if case not in left_out]:
            if rank == 0:
                note(case=case)
            faulthandler.dump_traceback_later(limit, exit=True, file=stack)
            start = time.perf_counter()
            try:
                found: dict = {"rows": cases[case]()}
            except Exception:
                found = {"failed": traceback.format_exc().splitlines()[-SAID:]}
                note(case=case, raised=found["failed"])
            if several:
                raised: list = [None] * dist.get_world_size()
                dist.all_gather_object(raised, found.get("failed"))
                found |= {"failed": next(filter(None, raised))} if any(raised) else {}
            faulthandler.cancel_dump_traceback_later()
            if rank == 0:
                note(case=case, seconds=round(time.perf_counter() - start, 2), **found)
            if device == "cuda":
                torch.cuda.empty_cache()
        faulthandler.disable()
    if dist.is_initialized():
        dist.destroy_process_group()


def start_part(name: str, module: str, device: str, ranks: int, limit: float, each: float) -> Iterator[dict]:
    """The cases of a part as they end. One that takes its process with it, or more than `each` seconds, is a failure,
    and a new process does those after it, until `limit` seconds are over."""
    end, over = time.monotonic() + limit, set()
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory(prefix="scaling-gpu-") as folder:
        while True:
            report = Path(folder, f"{len(over)}.jsonl")
            report.touch()
            given = {"name": name, "module": module, "device": device, "report": str(report), "limit": each}
            given = json.dumps({**given, "left_out": sorted(over)})
            code, said = last_words([*command, str(HERE / "gpu.py"), "--part", given], max(1.0, end - time.monotonic()))
            notes = [json.loads(line) for line in report.read_text().splitlines()]
            begun, ended = {note["case"] for note in notes}, [note for note in notes if "seconds" in note]
            yield from ended
            over |= begun
            if code == 0:
                return
            lost = begun - {note["case"] for note in ended}
            raised = [note["raised"] for note in notes if "raised" in note and note["case"] in lost]
            stack = Path(f"{report}.stack0")
            hung = stack.read_text().splitlines()[:SAID] if stack.exists() else []
            why = f"ended with exit code {code}" if code is not None else f"the part's {limit:.0f} s are over"
            case = ", ".join(lost) or ("its end" if begun else "its start")
            yield {"case": case, "failed": [why, *(raised[0] if raised else hung or said)]}
            if code is None or not begun:
                return


def last_words(command: list[str], limit: float) -> tuple[int | None, list[str]]:
    """(exit code, or None after `limit` seconds; the last lines that it printed). Its descendants end with it."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read().splitlines()[-SAID:]


def plan(only: list[str], device: str, ranks: int) -> dict[str, int]:
    """Ranks of each part that there is something to do for."""
    chosen = {name: PARTS[name].ranks or ranks for name in PARTS if name in only}
    if device == "cpu" and "shared" in chosen:
        chosen["shared"] = max(2, ranks)
    return {name: n for name, n in chosen.items() if ranks > 1 or name not in ("equal", "beside")}


def main() -> int:
    import gpu_table
    from report import options

    parser = options(__doc__, only=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes (default cuda)")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), help="default: all GPUs; on a CPU 2")
    parser.add_argument("--short", action="store_true", help=f"{', '.join(SHORT[1])}, for {SHORT[0]} minutes")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder (default gpu-results)")
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)  # this process runs it
    args = parser.parse_args()
    if args.part:
        run_part(**args.part)
        return 0
    # What the machine is: in a process of its own, too, so that this one holds no GPU.
    first, *_ = start_part("about", "gpu_table", args.device, ALONE, limit=180, each=180)
    about = first["rows"][0] if "rows" in first else {"devices": [], "unknown": first["failed"]}
    if args.device == "cuda" and not about["devices"]:
        parser.error("torch finds no GPU here; fix: --device cpu, which runs every part at a tiny size")
    ranks = args.ranks or (2 if args.device == "cpu" else 1 << (len(about["devices"]).bit_length() - 1))
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["GPU_OUT"] = str(args.out.resolve())
    minutes, only = SHORT if args.short else (MINUTES, args.only)
    begun, parts = time.monotonic(), {}
    found = {"about": about, "device": args.device, "ranks": ranks, "parts": parts}
    for name, n in plan(only, args.device, ranks).items():
        start = time.monotonic()
        left = begun + 60 * minutes - start
        limit = min(left, PARTS[name].seconds)
        each = limit / 2 if args.device == "cuda" else limit  # a CPU may be busy with other work
        parts[name] = {"ranks": n, "cases": []}
        late = [{"case": "all", "failed": [f"not run: {minutes} minutes are over"]}]
        for case in start_part(name, PARTS[name].module, args.device, n, limit, each) if left > 5 else late:
            parts[name]["cases"].append(case)
            word = "FAILED" if "failed" in case else f"{case['seconds']:.1f} s"
            print(f"{name}: {case['case']}: {word}", flush=True)
        parts[name]["seconds"] = round(time.monotonic() - start, 1)
        (args.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")  # after each part: never lost
        (args.out / "gpu.md").write_text(gpu_table.markdown(found))
    failures = gpu_table.failures(parts)
    print(f"\n{gpu_table.markdown(found)}\n{args.out}/gpu.json, {args.out}/gpu.md; {len(failures)} failures")
    print(json.dumps(gpu_table.summary(found), default=str))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
