"""The tables of gpu.py in Markdown, and part `about`: what the machine is."""

import platform
from collections import Counter

from report import spread, table


def cases_about(device, tiny):
    """Versions and devices."""
    import torch

    def about():
        found: dict = {"torch": torch.__version__, "python": platform.python_version(), "devices": []}
        if device == "cuda":
            found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
            for i in range(torch.cuda.device_count()):
                has = torch.cuda.get_device_properties(i)
                found["devices"].append({"name": has.name, "GB": round(has.total_memory / 1e9, 1)})
        return [found]

    return {"about": about}


def rows_of(parts: dict, name: str) -> list[dict]:
    return [row for case in parts.get(name, {}).get("cases", []) for row in case.get("rows") or []]


def failures(parts: dict) -> list[list[str]]:
    """(part, case, last line of what it said)."""
    found = []
    for name, part in parts.items():
        for case in part["cases"]:
            if "failed" in case:
                found.append((name, case["case"], " ".join(case["failed"][:1] + case["failed"][-1:])))
            for row in case.get("rows") or []:
                found += [(name, f"{case['case']}: {side}", why) for side, why in row.get("failed", {}).items()]
    return [[cell(text) for text in each] for each in found]


def cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]


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


def summary(found: dict) -> dict:
    """What others compare: decode steps in ms with their share of the bandwidth, training steps with their ratio."""
    parts, (_, bandwidth, _) = found["parts"], peaks(found)
    decode = [
        {
            "B": row["B"],
            "side": row["side"],
            "ms": 1e3 * row["decode"],
            "share": row["bytes"] / row["decode"] / bandwidth,
        }
        for row in rows_of(parts, "decode")
        if bandwidth
    ]
    train = [{each: row[each] for each in ("model", "how", "ms", "ratio")} for row in rows_of(parts, "train")]
    return {"devices": found["about"]["devices"], "decode": decode, "train": train, "failures": len(failures(parts))}


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def markdown(found: dict) -> str:
    parts, about = found["parts"], found["about"]
    flops, bandwidth, source = peaks(found)
    devices = about["devices"]
    where = f"{len(devices)} x {devices[0]['name']}" if devices else f"the CPU, {found['ranks']} ranks"
    versions = ", ".join(f"{key} {about[key]}" for key in ("torch", "cuda", "nccl", "python") if about.get(key))
    shares = f"Shares are of {source}: {flops / 1e12:.4g} TFLOP/s and {bandwidth / 1e9:.4g} GB/s."
    texts = [f"{where}; {versions}. {'Tiny sizes. ' if found['device'] == 'cpu' else ''}{shares}"]
    for name, (heading, write) in SECTIONS.items():
        if name in parts:
            try:
                text = write(rows_of(parts, name), flops, bandwidth)
            except Exception as error:  # the figures are in the JSON file: one table that fails takes no other with it
                text = f"This table could not be written: {type(error).__name__}: {cell(str(error))}"
            texts += [f"### {heading}", text]
    if failed := failures(parts):
        texts += ["### What failed", table(["part", "case", "why"], failed, 3)]
    return "\n\n".join(text for text in texts if text) + "\n"


def figures(row: dict, side: str, flops: float) -> dict[str, str]:
    """A side's milliseconds and what they make; of one that failed that word, of one that there is not nothing."""
    if side not in row["ms"]:
        return dict.fromkeys(("tokens/s", "MFU", "MB", "ratio"), "") | {"ms": "failed" * (side in row["failed"])}
    seconds = row["ms"][side][1] / 1e3
    return {
        "ms": f"{seconds * 1e3:.1f}",
        "tokens/s": f"{row.get('tokens', 0) / seconds:,.0f}",
        "MFU": share(row["flops"] / row["ranks"] / seconds, flops),
        "MB": f"{row['MB'][side]:.0f}",
        "ratio": spread(row["ratio"][side]) if side in row["ratio"] else "",
    }


def of_rates(rows, flops, bandwidth) -> str:
    return table(["what", "rate"], [[row["what"], f"{row['rate']:.3g}"] for row in rows])


def of_equal(rows, flops, bandwidth) -> str:
    kinds = Counter()
    for row in rows:
        if not row["line"].startswith(("refused", "loud in")):
            kinds[row["kind"]] += row["calls"]
    return table(["what", "calls that are as on one device"], [[*each] for each in kinds.items()])


def of_train(rows, flops, bandwidth) -> str:
    lines = []
    for row in rows:
        ours, theirs = (figures(row, side, flops) for side in row["sides"])
        line = [row["model"], row["how"], *(ours[each] for each in ("ms", "tokens/s", "MFU", "MB"))]
        lines.append([*line, *(theirs[each] for each in ("ms", "MFU", "MB", "ratio"))])
    return table(["model", "", "ms", "tokens/s", "MFU", "MB", "nn.Module, ms", "MFU", "MB", "ratio"], lines, 2)


def of_decode(rows, flops, bandwidth) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: row["B"]):
        line = [
            row["B"],
            row["T"],
            row["side"],
            f"{row['prefill'] * 1e3:.1f}",
            share(row["flops"] / row["prefill"], flops),
        ]
        rate = row["bytes"] / row["decode"]
        lines.append([*line, f"{row['decode'] * 1e3:.3f}", f"{rate / 1e9:.0f}", share(rate, bandwidth)])
    return table(["B", "prompt", "", "prefill, ms", "MFU", "decode, ms a step", "GB/s", "share of bandwidth"], lines, 3)


def of_attention(rows, flops, bandwidth) -> str:
    lines = []
    for row in rows:
        lines.append([row["kernel"]])
        for seconds, work in ((row["forward"], row["flops"]), (row["both"], row["both flops"])):
            rate = work / seconds
            lines[-1] += [f"{seconds * 1e3:.2f}", f"{rate / 1e12:.4g}", share(rate, flops)]
    return table(["kernel", "forward, ms", "TFLOP/s", "share", "and backward, ms", "TFLOP/s", "share"], lines)


def of_beside(rows, flops, bandwidth) -> str:
    head = ["ours", "PyTorch's", "model", "mesh", "ours, ms", "ours, MFU", "tuned, ms", "ours / tuned"]
    head += ["ours compiled, ms", "tuned compiled, ms", "ours / tuned, compiled", "ours, MB", "tuned, MB"]
    lines = []
    for row in rows:
        mesh = ",".join(f"{axis}={size}" for axis, size in row["mesh"].items())
        eager, tuned = figures(row, "ours", flops), figures(row, "tuned", flops)
        line = [row["ours"], row["theirs"], row["model"], mesh, eager["ms"], eager["MFU"], tuned["ms"], tuned["ratio"]]
        compiled = figures(row, "tuned compiled", flops)
        line += [figures(row, "ours compiled", flops)["ms"], compiled["ms"], compiled["ratio"]]
        lines.append([*line, eager["MB"], tuned["MB"]])
    return table(head, lines, 4)


def of_trace(rows, flops, bandwidth) -> str:
    return "\n".join(f"{row['file']}: {row['ranks']} ranks, {row['seconds']:.3g} s" for row in rows)


SECTIONS = {
    "rates": ("The device", of_rates),
    "nccl": ("NCCL with one rank", of_equal),
    "shared": ("Ranks that share one device, equal to one device", of_equal),
    "equal": ("All ranks, equal to one device", of_equal),
    "train": ("A training step on one device", of_train),
    "decode": ("Prefill and decode", of_decode),
    "attention": ("Kernels of attention", of_attention),
    "beside": ("Beside PyTorch's own, on all ranks", of_beside),
    "trace": ("A trace for ui.perfetto.dev", of_trace),
}
