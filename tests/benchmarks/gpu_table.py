"""The tables of gpu.py in Markdown, and what the machine is.

python tests/benchmarks/gpu_table.py cuda       the machine, as JSON: in a process of its own, so that the one that
                                                starts the parts holds no GPU
"""

import json
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path

from report import spread, table


def describe(device: str) -> dict:
    """Versions and devices; a machine that does not answer has none."""
    try:
        command = [sys.executable, str(Path(__file__).resolve()), device]
        found = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
        return json.loads(found.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", "") or "").splitlines()[-3:]
        return {"devices": [], "unknown": [f"{type(error).__name__}: {error}", *said]}


def asked(device: str) -> dict:
    import torch

    found: dict = {"torch": torch.__version__, "python": platform.python_version(), "devices": []}
    if device == "cuda" and torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        for i in range(torch.cuda.device_count()):
            has = torch.cuda.get_device_properties(i)
            found["devices"].append({"name": has.name, "GB": round(has.total_memory / 1e9, 1)})
    return found


def rows_of(parts: dict, name: str) -> list[dict]:
    return [row for case in parts.get(name, {}).get("cases", []) for row in case.get("rows") or []]


def failures(parts: dict) -> list[tuple[str, str, str]]:
    """(part, case, last line of what it said)."""
    found = []
    for name, part in parts.items():
        for case in part["cases"]:
            if "failed" in case:
                found.append((name, case["case"], " ".join(case["failed"][:1] + case["failed"][-1:])))
            for row in case.get("rows") or []:
                found += [(name, f"{case['case']}: {side}", why) for side, why in row.get("failed", {}).items()]
    return found


def peaks(found: dict) -> tuple[float, float, str]:
    """(FLOPs/s in bf16, bytes/s of the memory, where they are from): of the book's table of chips, or measured."""
    from scaling.hardware import chip, chips

    rates = {row["what"]: row["rate"] for row in rows_of(found["parts"], "rates")}
    devices = found["about"]["devices"]
    name = devices[0]["name"].lower() if devices else ""
    known = next((each for each in chips() if each in name), None)  # as in "nvidia h100 80gb hbm3"
    if known and "bf16" in (flops := dict(chip(known).peaks)):
        return flops["bf16"], chip(known).hbm_bw, f"the book's table, for {known}"
    dtype = "bfloat16" if devices else "float32"
    measured = rates.get(f"product in {dtype}, FLOPs/s", 0.0), rates.get("copy, bytes/s read and written", 0.0)
    return *measured, "what the part `rates` measured"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def ratio(row: dict, sides: str) -> str:
    return spread(row["ratio"][sides]) if sides in row["ratio"] else ""


def middle(row: dict, side: str) -> str:
    return f"{row['ms'][side][1]:.1f}" if side in row["ms"] else "failed" if side in row["failed"] else ""


def markdown(found: dict) -> str:
    parts, about = found["parts"], found["about"]
    flops, bandwidth, source = peaks(found)
    devices = [each["name"] for each in about["devices"]] or [f"the CPU, {found['ranks']} ranks"]
    where = f"{len(devices)} x {devices[0]}" if about["devices"] else devices[0]
    versions = ", ".join(f"{key} {about[key]}" for key in ("torch", "cuda", "nccl", "python") if about.get(key))
    shares = f"Shares are of {source}: {flops / 1e12:.4g} TFLOP/s and {bandwidth / 1e9:.4g} GB/s."
    texts = [f"{where}; {versions}. {'Tiny sizes. ' if found['tiny'] else ''}{shares}"]
    for name, heading, write in SECTIONS:
        if name in parts:
            texts += [f"### {heading}"]
            try:
                texts += [write(parts, flops, bandwidth)]
            except Exception as error:  # the figures are in the JSON file: one table that fails takes no other with it
                texts += [f"This table could not be written: {type(error).__name__}: {cell(str(error))}"]
    if failed := failures(parts):
        texts += ["### What failed", table(["part", "case", "why"], [[cell(x) for x in row] for row in failed], 3)]
    return "\n\n".join(text for text in texts if text) + "\n"


def cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]


def of_rates(parts, flops, bandwidth) -> str:
    return table(["what", "rate"], [[row["what"], f"{row['rate']:.3g}"] for row in rows_of(parts, "rates")])


def of_equal(name: str):
    def write(parts, flops, bandwidth) -> str:
        kinds = Counter()
        for row in rows_of(parts, name):
            if not row["line"].startswith(("refused", "loud in")):
                kinds[row["kind"]] += row["calls"]
        return table(["what", "calls that are as on one device"], [[*each] for each in kinds.items()])

    return write


def of_train(parts, flops, bandwidth) -> str:
    head = ["model", "", "ms", "tokens/s", "MFU", "MB", "nn.Module, ms", "MFU", "MB", "ratio"]
    lines = []
    for row in rows_of(parts, "train"):
        what = ("compiled" if row["compiled"] else "eager") + (f", remat {row['remat']}" * (row["remat"] != "none"))
        line = [row["model"], what]
        for side in ("ours", "tuned"):
            seconds = row["ms"][side][1] / 1e3 if side in row["ms"] else 0
            line += [middle(row, side)]
            line += [f"{row['tokens'] / seconds:,.0f}" if seconds else ""] if side == "ours" else []
            line += [share(row["flops"] / seconds, flops) if seconds else ""]
            line += [f"{row['MB'][side]:.0f}" if side in row["MB"] else ""]
        lines.append([*line, ratio(row, "")])
    return table(head, lines, 2)


def of_decode(parts, flops, bandwidth) -> str:
    head = ["B", "prompt", "prefill, ms", "MFU", "decode, ms a step", "GB/s", "share", "theirs: prefill", "decode"]
    rows = rows_of(parts, "decode")
    theirs = {row["B"]: row for row in rows if row["side"] != "ours"}
    lines = []
    for row in rows:
        if row["side"] == "ours":
            other = theirs.get(row["B"])
            rate = row["bytes"] / row["decode"]
            lines.append(
                [row["B"], row["T"], f"{row['prefill'] * 1e3:.1f}", share(row["flops"] / row["prefill"], flops)]
                + [f"{row['decode'] * 1e3:.2f}", f"{rate / 1e9:.0f}", share(rate, bandwidth)]
                + ([f"{other[each] * 1e3:.2f}" for each in ("prefill", "decode")] if other else ["", ""])
            )
    return table(head, lines, 0)


def of_attention(parts, flops, bandwidth) -> str:
    lines = []
    for row in rows_of(parts, "attention"):
        line = [row["kernel"]]
        for time, work in (("forward", "flops"), ("both", "both flops")):
            line += [
                f"{row[time] * 1e3:.2f}",
                f"{row[work] / row[time] / 1e12:.4g}",
                share(row[work] / row[time], flops),
            ]
        lines.append(line)
    return table(["kernel", "forward, ms", "TFLOP/s", "share", "and backward, ms", "TFLOP/s", "share"], lines)


def of_beside(parts, flops, bandwidth) -> str:
    head = ["ours", "PyTorch's, tuned", "model", "mesh", "ms", "MFU", "theirs", "ratio", "compiled", "theirs", "ratio"]
    lines = []
    for row in rows_of(parts, "beside"):
        mesh = ",".join(f"{axis}={size}" for axis, size in row["mesh"].items())
        rate = row["flops"] / row["ranks"] / row["ms"]["ours"][1] * 1e3 if "ours" in row["ms"] else 0
        line = [row["ours"], row["theirs"], row["model"], mesh, middle(row, "ours"), share(rate, flops)]
        line += [middle(row, "tuned"), ratio(row, "eager")]
        line += [middle(row, "ours compiled"), middle(row, "tuned compiled"), ratio(row, "compiled")]
        lines.append([*line, *(f"{row['MB'][side]:.0f}" if side in row["MB"] else "" for side in ("ours", "tuned"))])
    return table([*head, "MB", "theirs"], lines, 4)


def of_trace(parts, flops, bandwidth) -> str:
    return "\n".join(f"{row['file']}: {row['ranks']} ranks, {row['seconds']:.3g} s" for row in rows_of(parts, "trace"))


SECTIONS = (
    ("rates", "The device", of_rates),
    ("nccl", "NCCL with one rank", of_equal("nccl")),
    ("shared", "Ranks that share one device, equal to one device", of_equal("shared")),
    ("equal", "All ranks, equal to one device", of_equal("equal")),
    ("train", "A training step on one device", of_train),
    ("decode", "Prefill and decode", of_decode),
    ("attention", "Kernels of attention", of_attention),
    ("beside", "Beside PyTorch's own, on all ranks", of_beside),
    ("trace", "A trace for ui.perfetto.dev", of_trace),
)

if __name__ == "__main__":
    print(json.dumps(asked(sys.argv[1])))
