"""What a box with 1 to 8 GPUs says of this project: equalities, speed beside PyTorch's own, memory, a trace.

    python tests/benchmarks/gpu.py
    python tests/benchmarks/gpu.py --only train,decode --out results
    python tests/benchmarks/gpu.py --device cpu --ranks 2

All GPUs take part, for about ten minutes; on a CPU every part runs at a tiny size, over gloo. It runs from a checkout
and needs torch, numpy and optree. Each part runs in a process of its own, those of several ranks under torchrun, and
has a limit of time. A case that raises, crashes or hangs is named with the end of what it said, and the part goes on
after it. Written are gpu.json (every figure), gpu.md (tables for docs/speed.md) and trace.json (for ui.perfetto.dev).
Exit code 1: there were failures.

    rates      products and copies of the device: what shares are taken of
    nccl       torch's calls below collectives, by NCCL on one rank
    shared     as `equal`, on four ranks that share the first device
    equal      collectives, their derivatives, strategies: as one device
    train      a Transformer's step beside the same nn.Module, as MFU
    decode     prefill and decode, beside transformers if that is there
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
    "rates": Part("gpu_one", ALONE, 60),
    "nccl": Part("gpu_equal", ALONE, 60),
    "shared": Part("gpu_equal", 4, 120),
    "equal": Part("gpu_equal", ALL, 120),
    "train": Part("gpu_one", ALONE, 300),
    "decode": Part("gpu_one", ALONE, 120),
    "attention": Part("gpu_one", ALONE, 60),
    "beside": Part("gpu_many", ALL, 300),
    "trace": Part("gpu_many", ALL, 60),
}
SAID = 12  # lines of what a process said last that are kept of a failure


# The process that runs one part


def run_part(name: str, module: str, device: str, tiny: bool, report: Path, left_out: set[str], limit: float) -> None:
    """Each case of a part, noted in `report` when it begins and when it has ended on all ranks, one line of JSON each.

    A case that hangs ends the process after `limit` seconds; where it hung, or crashed, stands in report.stack. A rank
    that raises notes so: if it does so alone, the others wait for it until their collective's timeout ends them.
    """
    import torch
    import torch.distributed as dist

    from scaling.launch.process import end_with_parent

    end_with_parent(os.getppid())
    torch.set_num_threads(1)
    rank, several = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) > 1
    if device == "cuda":  # now, so that every count of memory is the GPU's
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.init()

    def note(**what) -> None:
        with report.open("a") as file:
            file.write(json.dumps(what, default=str) + "\n")

    with report.with_suffix(".stack" if rank == 0 else f".stack{rank}").open("w") as stack:
        faulthandler.enable(stack)
        cases: dict[str, Callable] = getattr(importlib.import_module(module), f"cases_{name}")(device, tiny)
        for case, call in cases.items():
            if case in left_out:
                continue
            if rank == 0:
                note(case=case)
            faulthandler.dump_traceback_later(limit, exit=True, file=stack)
            start = time.perf_counter()
            try:
                found: dict = {"rows": call()}
            except Exception:
                found = {"failed": traceback.format_exc().splitlines()[-SAID:]}
                note(case=case, rank=rank, raised=found["failed"])
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


# The process that starts them


def start_part(
    name: str, device: str, tiny: bool, ranks: int, limit: float, folder: Path, each: float
) -> Iterator[dict]:
    """The cases of a part as they end. One that takes its process with it, or more than `each` seconds, is a failure,
    and a new process does those after it, until `limit` seconds are over."""
    end, over = time.monotonic() + limit, set()
    while True:
        report = folder / f"{name}-{len(over)}.jsonl"
        report.touch()
        left = max(1.0, end - time.monotonic())
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(HERE / "gpu.py"), "--part", name, PARTS[name].module, "--device", device]
        command += ["--report", str(report), "--limit", str(each)]
        command += ["--left-out", json.dumps(sorted(over))] + (["--tiny"] if tiny else [])
        code, said = last_words(command, left, report.with_suffix(".log"))
        notes = [json.loads(line) for line in report.read_text().splitlines()]
        begun, ended = {note["case"] for note in notes}, [note for note in notes if "seconds" in note]
        yield from ended
        over |= begun
        if code == 0:
            return
        lost = begun - {note["case"] for note in ended}
        raised = [note["raised"] for note in notes if "raised" in note and note["case"] in lost]
        stack = report.with_suffix(".stack")
        hung = stack.read_text().splitlines()[:SAID] if stack.exists() else []
        why = f"ended with exit code {code}" if code is not None else f"the part's {limit:.0f} s are over"
        case = ", ".join(lost) or ("its end" if begun else "its start")
        yield {"case": case, "failed": [why, *(raised[0] if raised else hung or said)]}
        if code is None or not begun:
            return


def last_words(command: list[str], limit: float, log: Path) -> tuple[int | None, list[str]]:
    """(exit code, or None after `limit` seconds; the last lines that it printed). Its descendants end with it."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, log.read_text(errors="replace").splitlines()[-SAID:]


def plan(only: list[str], device: str, ranks: int) -> dict[str, int]:
    """Ranks of each part that there is something to do for."""
    chosen = {name: part.ranks or ranks for name, part in PARTS.items() if name in only}
    if device == "cpu" and "shared" in chosen:
        chosen["shared"] = max(2, ranks)
    if ranks == 1:
        chosen.pop("equal", None)
        chosen.pop("beside", None)
    return chosen


def main() -> int:
    from scaling.common.console import Parser

    parser = Parser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes (default cuda)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a GPU too")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4, 8), help="default: all GPUs; on a CPU 2")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas: %(default)s")
    parser.add_argument("--minutes", type=float, default=10, help="of all parts together (default 10)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder (default gpu-results)")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # one of them, and its module
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=60, help=argparse.SUPPRESS)
    parser.add_argument("--left-out", type=json.loads, default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    tiny = args.tiny or args.device == "cpu"
    if args.part:
        run_part(*args.part, args.device, tiny, args.report, set(args.left_out), args.limit)
        return 0
    if unknown := set(args.only.split(",")) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    import gpu_table

    about = gpu_table.describe(args.device)
    if args.device == "cuda" and not about["devices"]:
        parser.error("torch finds no GPU here; fix: --device cpu, which runs every part at a tiny size")
    ranks = args.ranks or (2 if args.device == "cpu" else 1 << (len(about["devices"]).bit_length() - 1))
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["GPU_OUT"] = str(args.out.resolve())
    begun, parts = time.monotonic(), {}
    found = {"about": about, "device": args.device, "tiny": tiny, "ranks": ranks, "parts": parts}
    with tempfile.TemporaryDirectory(prefix="scaling-gpu-") as folder:
        for name, n in plan(args.only.split(","), args.device, ranks).items():
            start, left = time.monotonic(), begun + 60 * args.minutes - time.monotonic()
            parts[name] = {"ranks": n, "cases": []}
            if left < 5:
                parts[name]["cases"].append({"case": "all", "failed": [f"not run: {args.minutes} minutes are over"]})
                continue
            limit = min(left, PARTS[name].seconds)
            each = limit / 2 if args.device == "cuda" else limit  # a CPU may be busy with other work
            for case in start_part(name, args.device, tiny, n, limit, Path(folder), each):
                parts[name]["cases"].append(case)
                word = "FAILED" if "failed" in case else f"{case['seconds']:.1f} s"
                print(f"{name}: {case['case']}: {word}", flush=True)
            parts[name]["seconds"] = round(time.monotonic() - start, 1)
            (args.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")  # after each part: never lost
            (args.out / "gpu.md").write_text(gpu_table.markdown(found))
    failures = gpu_table.failures(parts)
    print(f"\n{gpu_table.markdown(found)}\n{args.out}/gpu.json, {args.out}/gpu.md; {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
