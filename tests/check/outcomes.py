"""Each faulty edit of tests/check/mutants.py run once on four ranks beside the right program, and what came of it.

    python tests/check/outcomes.py              runs those that are not in outcomes.txt yet, and adds them
    python tests/check/outcomes.py --report     what the static checker refuses of those that change numbers, by kind

An edit's outcome is "same" (no number changes), "wrong" (numbers change and nothing is said) or "raises". The file
holds a line an edit: its digest and outcome.
"""

import ast
import importlib
import sys
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from types import ModuleType

import torch
from mutants import ROOT, mutants

from scaling import launch, optim, tree
from scaling.check import check_source
from scaling.check.modules import Modules
from scaling.configs import Config
from scaling.models import transformer as model
from scaling.spec import parse
from scaling.strategies import transformer
from scaling.strategies.stack import Strategy

STORED = Path(__file__).parent / "outcomes.txt"
SIZES = {"L": 2, "B": 8, "D": 8, "F": 16}
MODEL = Config("tiny", 1, 8, 16, 4, 2, 4, 16).with_(window=(3,), attention_bias=True, output_bias=True)
TOGETHER, SECONDS = 24, 20  # edits that share their ranks; how long these wait for one another


def digest(file: str, before: str, edit: str) -> str:
    return blake2b(f"{file}\n{before}\n{edit}".encode(), digest_size=6).hexdigest()


def listed(text: str) -> ModuleType:
    """A strategy's file, or of a chapter its listing alone: imports, types and functions."""
    module, parsed = ModuleType("edited"), ast.parse(text)
    if "page.end()" in text:
        kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
        types = ("SPECS", "STORED", "USED")
        parsed.body = [n for n in parsed.body if isinstance(n, kept) or ast.unparse(n).startswith(types)]
    exec(compile(parsed, "edited", "exec"), module.__dict__)
    return module


def random(types: dict, mesh) -> dict:
    """Arrays of these types, drawn whole and sharded."""
    g = torch.Generator().manual_seed(0)
    whole = {
        name: torch.randn(parse(t).global_shape(SIZES), generator=g, dtype=torch.float64) for name, t in types.items()
    }
    return {name: tree.shard(x, types[name], mesh) for name, x in whole.items()}


def of_strategy(mesh, module: ModuleType):
    """Two layers with gelu, norm and residual: the result, and all gradients; of ZeRO also the update."""
    strategy = getattr(module, "STRATEGY", None) or Strategy(module.SPECS, module.forward, module.backward)
    weights = {name: module.SPECS[name].replace("[", "[L, ") for name in ("W_in", "W_out")}
    arrays = random(weights | {"In": module.SPECS["In"], "dOut": module.SPECS["Out"].replace("Out", "dOut")}, mesh)
    In, dOut = arrays.pop("In"), arrays.pop("dOut")
    Out, saved = strategy.forward(arrays, In, mesh, "gelu", True, True)
    results = [Out, *strategy.backward(dOut, saved, arrays, mesh)]
    if hasattr(module, "scatter_grads"):
        adamw = optim.adamw(0.1)
        grads = {name: list(dW.unbind()) for name, dW in results[2].items()}
        results += [module.update(adamw, grads, module.init(adamw, arrays, mesh), arrays, mesh)[0]]
    return results


def of_module(mesh, module: ModuleType):
    """A chapter's gradients of an nn.Module by the types of its params."""
    torch.manual_seed(0)
    own = torch.nn.Sequential()
    for name, part in (("fc1", torch.nn.Linear(8, 16)), ("act", torch.nn.GELU()), ("fc2", torch.nn.Linear(16, 8))):
        own.add_module(name, part)
    whole = {name: W.detach().double() for name, W in own.named_parameters()}
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = "x[B_X, D]" if "Y" not in str(module.STORED) else "x[B, D]"
    return module.gradients(own.double(), tree.shard(whole, module.STORED, mesh), tree.shard(x, rows, mesh), mesh)


def of_pods(mesh, module: ModuleType):
    partial = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(mesh.rank))
    return module.grads_of_layer(partial.clone(), mesh), module.grads_of_layer_flat(partial, mesh)


def replace(module: ModuleType, text: str) -> None:
    """Run another text in a module, and give what it defines to all that had imported it from there."""
    before = {
        id(value): key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    }
    kept = list(vars(module).values())  # so that no id is used again
    exec(compile(text, str(module.__file__), "exec"), vars(module))
    for other in [m for name, m in sys.modules.items() if name.startswith("scaling.")]:
        for key, value in list(vars(other).items()):
            if id(value) in before and kept:
                setattr(other, key, vars(module)[before[id(value)]])


def of_transformer(mesh, name: str, text: str):
    """The loss and gradients of tiny Transformers: with biases, tied, with experts; a file of theirs edited."""
    replace(importlib.import_module(f"scaling.strategies.transformer.{name}"), text)
    found = []
    for config in (MODEL, MODEL.with_(tied=True), MODEL.with_(E=2, k=1)):
        params = transformer.shard(model.init(config, 0, torch.float64), config, mesh)
        g = torch.Generator().manual_seed(0)
        tokens, targets = (torch.randint(0, config.V, (4, 8), generator=g) for _ in range(2))
        weights = torch.rand(4, 8, generator=g, dtype=torch.float64)
        batch = tree.shard([tokens, targets, weights], ["t[B_X, T]"] * 3, mesh)
        options = {"weights": batch[2], "label_smoothing": 0.1, "z_loss": 0.01}
        found.append(transformer.loss_and_grads(params, *batch[:2], config, mesh, **options))
    return found


def program(mesh, file: str, text: str):
    """What a file's program gives on this rank, as one flat vector."""
    name = Path(file).stem
    if "transformer/" in file:
        results = of_transformer(mesh, name, text)
    elif name == "05_pods":
        results = of_pods(mesh, listed(text))
    else:
        module = listed(text)
        results = [of_strategy(mesh, module), of_module(mesh, module) if hasattr(module, "gradients") else []]
    return torch.cat([torch.as_tensor(x).flatten().double() for x in tree.leaves(results)])


def outcomes(mesh, file: str, texts: list[str]) -> list[str]:
    """Of each text on this rank; they share the ranks, so one that leaves a collective behind ends them all."""
    wanted = program(mesh, file, right(file))
    found = []
    for text in texts:
        try:
            got = program(mesh, file, text)
        except Exception:
            found.append("raises")
            continue
        alike = got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-9, atol=1e-12)
        found.append("same" if alike else "wrong")
    return found


def right(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def on_ranks(file: str, texts: list[str]) -> list[str]:
    """The outcomes of edits of one file: of all together, or where one spoils the ranks of each alone."""
    sizes = {"P": 2, "X": 2, "Y": 1} if "pods" in file else {"X": 2, "Y": 2}
    try:
        ranks = launch.run(outcomes, sizes, file, texts, timeout=SECONDS)
        words = [set(each) for each in zip(*ranks, strict=True)]  # of each edit on all ranks
        return [
            "wrong" if "wrong" in each and "raises" not in each else "raises" if "raises" in each else "same"
            for each in words
        ]
    except Exception:
        if len(texts) == 1:
            return ["raises"]
        half = len(texts) // 2
        return on_ranks(file, texts[:half]) + on_ranks(file, texts[half:])


def stored() -> dict[str, str]:
    lines = STORED.read_text(encoding="utf-8").splitlines() if STORED.exists() else []
    return dict(line.split() for line in lines)


def main() -> None:
    known, todo = stored(), {}
    every = [(kind, file, before, edit, text) for kind, file, _, before, edit, text in mutants()]
    if "--report" not in sys.argv:
        for kind, file, before, edit, text in every:
            if digest(file, before, edit) not in known:
                todo.setdefault(file, {})[digest(file, before, edit)] = (kind, text)
        for file, edits in todo.items():
            keys = list(edits)
            for start in range(0, len(keys), TOGETHER):
                some = keys[start : start + TOGETHER]
                found = on_ranks(file, [edits[key][1] for key in some])
                with STORED.open("a", encoding="utf-8") as out:
                    out.writelines(f"{key} {word}\n" for key, word in zip(some, found, strict=True))
                print(file, start, Counter(found), flush=True)
        known = stored()
    report(every, known)


def report(every, known: dict[str, str]) -> None:
    modules, count, caught, silent = Modules(), Counter(), Counter(), []
    for kind, file, before, edit, text in every:
        if known.get(digest(file, before, edit)) != "wrong":
            continue
        count[kind] += 1
        found = bool(check_source(text, file, modules))
        caught[kind] += found
        if not found:
            silent.append(f"{kind}: {file}: {edit}")
    rows = [*((kind, caught[kind], n) for kind, n in count.items()), ("all", caught.total(), count.total())]
    for kind, refused, n in rows:
        print(f"{kind:36} {refused:5} of {n:5} that change numbers silently  {refused / max(1, n):6.1%}")
    print(*silent, sep="\n")


if __name__ == "__main__":
    main()
