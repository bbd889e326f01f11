"""What the commands take, to be spoiled: their options and the files that they read (misuse/commands.py)."""

import argparse
import copy
import json
import math
import random

TRAIN = ["--data", "text.txt", "--model", "tiny.json", "--batch", "2", "--seq", "16", "--steps", "1",
         "--eval-batches", "1"]  # fmt: skip
GIVE = ["--model", "hf", "--max-new-tokens", "2"]
PLAN = ["--model", "llama3-8b", "--chip", "v5e", "--chips", "16", "--batch", "1M"]
PLAN_SERVE = ["--model", "llama3-8b", "--chip", "v5e", "--context", "2048", "--most", "4"]
COMMANDS = {  # name: (module, arguments that are right and soon done)
    "train": ("scaling.train.command", TRAIN),
    "train dry": ("scaling.train.command", ["--dry-run", *TRAIN]),
    "train resume": ("scaling.train.command", ["--resume", "--out", "run", "--steps", "3"]),
    "train tokenize": ("scaling.train.tokenize", ["--data", "text.txt", "--out", "tokens"]),
    "train compare": ("scaling.train.compare", ["run", "run"]),
    "train export": ("scaling.train.export", ["run", "--out", "exported"]),
    "train flight": ("scaling.train.flight", ["run"]),
    "train verify": ("scaling.train.verify", ["run"]),
    "generate": ("scaling.generate.command", [*GIVE, "--prompt", "ab"]),
    "serve": ("scaling.serve.command", [*GIVE, "--input", "request.json", "--output", "completions.jsonl"]),
    "show": ("scaling.show", ["A[I_X, J_Y]"]),
    "show schedule": ("scaling.show.schedules", ["1f1b"]),
    "show params": ("scaling.show.params", ["--model", "tiny.json", "--mesh", "X=2"]),
    "check": ("scaling.check", ["program.py"]),
    "plan": ("scaling.plan.__main__", PLAN),
    "plan guide": ("scaling.plan.guide", ["--model", "llama3-8b", "--gpu", "h100"]),
    "plan published": ("scaling.plan.published", ["--only", "llama"]),
    "plan serve": ("scaling.plan.serve.command", PLAN_SERVE),
    "plan serve published": ("scaling.plan.serve.published", ["--only", "v5e"]),
    "measure": ("scaling.measure.command", ["--chip", "machine.toml", "--no-check"]),
    "measure network": ("scaling.measure.network", ["--repeats", "1"]),
    "notebook": ("scaling.book.notebook", ["program.py"]),
}
TEXTS = ["", " ", "-1", "0", "1", "2", "3", "7", "1.5", "-0.0", "1e3", "1e400", "nan", "inf", "-inf", "9" * 20,
         "9" * 400, "x", "x" * 300, "é", "none", "a,b", ",", "=", "1/3", "1/0", "[]", "{}", "A[I_X", "%s"]  # fmt: skip
MESHES = ["X", "X=", "X=0", "X=-1", "X=1.5", "X=2,X=2", "X=3", "X=1000000", "X=" + "9" * 30, "XY=2", "x=2", "Q=2",
          "X=2,", "Y=3", "C=5", "E=2", "Z=3", "X=2 Y=2", "tensor=0", "tensor=2,tensor=2", "tensor=3"]  # fmt: skip
FILES = ["gone", "gone/gone", "folder", "empty", "binary", "broken.json", "broken.toml", "list.json", "text.txt",
         "link", "binary.json", "binary.toml", "folder.json", "/dev/null", "/proc/nothing/x", "machine.toml", "hf",
         "run", "-"]  # fmt: skip
WRONG = [None, True, -1, 0, 1.5, 10**30, math.inf, math.nan, "", "x", [], {}, [1, "x"], {"x": 1}]
DOCUMENTS = {  # file: commands that read it
    "tiny.json": ["train dry", "show params"],
    "hf/config.json": ["generate", "serve"],
    "hf/tokenizer.json": ["generate"],
    "run/run.toml": ["train resume", "train export", "train compare"],
    "options.toml": ["train dry"],
    "model.toml": ["plan", "plan guide", "plan serve"],
    "machine.toml": ["plan", "measure", "plan serve"],
    "request.json": ["serve"],
}
GIVEN = {"options.toml": ["--config", "options.toml"], "model.toml": ["--model", "model.toml"],
         "machine.toml": ["--chip", "machine.toml"], "request.json": ["--input", "request.json"]}  # fmt: skip
TINY = {"name": "tiny", "L": 2, "D": 32, "F": 64, "N": 4, "K": 2, "H": 8, "V": 256}
ALL = {"gated": True, "E": 2, "k": 1, "window": [4, None], "rope_scaling": {"type": "linear", "factor": 2.0}}
MACHINE = {
    "kind": "cpu", "hbm_bytes": 8e9, "hbm_bw": 1e10, "flops": {"fp32": 1e11, "bf16": 1e11},
    "efficiency": {"attention": 0.5, "matmul": {"bf16": 0.5}}, "source": "a test",
    "levels": [{"name": "node", "degree": 2, "link_bw": 1e9}],
    "measured": [{"op": "AllReduce", "ranks": 2, "latency": 1e-5, "bandwidth": 1e9, "alone": False}],
}  # fmt: skip
REQUEST = {"id": "a", "prompt": "ab", "max_new_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
           "seed": 1, "stop": ["x"], "arrival": 0.0}  # fmt: skip


RIGHT = {
    "tiny.json": TINY, "model.toml": TINY | ALL, "machine.toml": MACHINE, "request.json": REQUEST,
    "options.toml": {"lr": 0.1, "warmup": 2, "mesh": "X=1", "dtype": "fp32", "norms": False},
}  # fmt: skip


def written(name: str, document) -> str:
    """A document as text: TOML if the file's name says so, with what stands in a table on one line each."""

    def value(x) -> str:
        if isinstance(x, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {value(inner)}" for key, inner in x.items()) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(value, x)) + "]"
        return '"none"' if x is None else str(x) if isinstance(x, float) else json.dumps(x)

    if name.endswith(".json"):
        return json.dumps(document)
    return (
        "".join(f"{json.dumps(key)} = {value(x)}\n" for key, x in document.items())
        if isinstance(document, dict)
        else "1"
    )


def drawn(name: str, options: list[argparse.Action], draw: random.Random) -> list[str]:
    """Arguments of a command, one or two of them wrong."""
    arguments = list(COMMANDS[name][1]) if name in COMMANDS else []
    for action in draw.sample(options, min(len(options), draw.choice([1, 1, 1, 2]))):
        kinds = (TEXTS, MESHES, FILES, [*map(str, action.choices or ["1"])])
        weights = (3, 6 if "mesh" in action.dest else 0.2, 2, bool(action.choices))
        value = draw.choice(draw.choices(kinds, weights)[0])
        if action.option_strings:
            arguments.append(action.option_strings[0] + ("" if action.nargs == 0 else f"={value}"))
        else:
            arguments[0] = value
    return arguments


def spoiled(document: dict, draw: random.Random) -> tuple[object, str]:
    """(a copy of which one value is wrong or gone, or which has a key too many; what was done)."""
    top, wrong = {"": copy.deepcopy(document)}, draw.choice(WRONG)
    places: list = [(top, "", "")]
    for holder, key, words in places:  # which grows meanwhile
        value = holder[key]
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, below, f"{words}.{below}") for below in keys]
    holder, key, words = draw.choice(places)
    if draw.random() < 0.15 and holder is not top:
        del holder[key]
        return top[""], f"{words} left out"
    if draw.random() < 0.1 and isinstance(holder[key], dict):
        holder[key]["unknown"] = wrong
        return top[""], f"{words}.unknown = {wrong!r}"
    holder[key] = wrong
    return top[""], f"{words} = {wrong!r}"
