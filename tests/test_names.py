"""What the source says to its readers and users: one name means one thing, among public classes, type aliases and
functions everywhere, and in what packages list; and each refusal says what to do instead, after the word "fix:".

Functions that share a name are ways to do the same, for one of the reasons below, and are called by their module's
name from other rooms: `hf.save` and `checkpoint.save`.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sources import parsed
from test_layers import ROOT, lists_of_names, modules

SAME = {  # what the public functions of one name have in common: their names
    "a collective: the call, as a ring, drawn, by JAX's name; its time on TPUs and on GPUs":
        "all_gather all_reduce all_to_all data_threshold gather ppermute reduce reduce_scatter",
    "one operation: planned, run, on arrays that carry their type, its time": "layer matmul reshard vjp",
    "what a strategy, a form of decoding and a model have":
        "attention backward embed forward head init layer_backward layer_forward loss loss_and_grads mlp "
        "normed_result specs",
    "whole arrays and shards: of one array, of a tree, of a Transformer's params": "shard unshard",
    "training's, and serving's: the cost of a step, the scheduler's step, what is planned, what is simulated":
        "evaluate meshes plans simulate step",
    "a command and its parts; it is run": "arguments main run",
    "an array by its line, and a model's params to int8": "quantize",
    "results, written: as JSON, text, a table, a picture, a file": "as_dict draw load save table text",
}  # fmt: skip
LISTED = {  # names that several packages list: why
    "all_gather": "in shard_map as JAX spells it",
    "all_to_all": "in shard_map as JAX spells it",
    "einsum": "of tensors with a line, and of arrays that carry their type",
    "matmul": "planned, and run on arrays that carry their type",
    "specs": "the types of params: of a strategy's, of an engine's",
    "loss": "of targets, and of their log-probabilities after rewards",
    "plans": "for training, and for serving",
    "quantize": "an array by its line, and a model's params to int8",
    "main": "a command",
}


def defined(kind: Any) -> dict[str, list[str]]:
    """{name: modules} of public classes or functions at the top of modules."""
    found = defaultdict(list)
    for module, tree in modules().items():
        names = {getattr(node, "name", "_") for node in tree.body if isinstance(node, kind)}
        for name in {name for name in names if not name.startswith("_")}:
            found[name].append(module)
    return found


def test_a_type_has_a_name_of_its_own():
    """A class, or an alias: `Axes = tuple[str, ...]`."""
    types = defined(ast.ClassDef)
    for module, tree in modules().items():
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = getattr(target, "id", "_")
            if name[0].isupper() and len(name) > 1 and not name.isupper() and "_" not in name:
                types[name].append(module)
    assert {"Axes", "Schedule", "Event"} <= types.keys(), "both kinds are found"
    assert not {name: where for name, where in types.items() if len(where) > 1}


def test_a_function_has_one_meaning():
    twice = {name for name, where in defined(ast.FunctionDef).items() if len(where) > 1}
    allowed = {name for names in SAME.values() for name in names.split()}
    assert twice - allowed == set(), "give each a name of its own, or an underscore where no other module uses it"
    assert allowed - twice == set(), "no longer there twice"


def test_packages_list_a_name_once():
    packages = {module.rpartition(".")[0] for module in modules()} - {"", "scaling"}
    names = Counter(name for m, given in lists_of_names() if m in packages for name in ast.literal_eval(given))
    twice = {name for name, count in names.items() if count > 1}
    assert twice == LISTED.keys(), twice ^ LISTED.keys()


# What catches it tells it with the fix; or which check failed, what is not there, who died.
CAUGHT = {"Illegal", "Mismatch", "NotInferred", "RuleBroken", "Unplaced", "UnpicklingError"}
ITS_OWN = {"AssertionError", "AttributeError", "IndexError", "RankError"}
NO_FIX = {  # where a sentence alone is enough: why
    "common/console.py": "an option's range, or why a file cannot be written, in argparse's one line",
    "exercise/judge.py": "what an answer lacks; the answer itself is not told",
    "models/template_process.py": "why a template is not rendered; who asked for it says the fix",
    "schedules/simulator.py": "a schedule that cannot run is quoted by rank and step",
    **dict.fromkeys(("trace/symbols.py", "train/programs.py", "train/structure.py"), "such a step is counted as it is"),
    "serve/requests.py": "the reason, in one line, in the answer to a client's request",
}


def texts(node: ast.AST, names: dict[str, str]) -> str:
    """The constant parts of a message, with those of names that were given a text in the same function."""
    found = ""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            found += part.value
        elif isinstance(part, ast.Name):
            found += names.get(part.id, "")
    return found


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, message) of each refusal of a module whose message, or a part of it, stands there."""
    module = parsed(path)
    constants = {"_fix": "fix:"}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = texts(node.value, {})
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes, names = [*ast.walk(function)], dict(constants)
        if not any(isinstance(node, ast.Raise) for node in nodes):
            continue
        for node in nodes:
            for target in node.targets if isinstance(node, ast.Assign) else ():
                assert isinstance(node, ast.Assign)
                pairs: Any = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        names[name.id] = names.get(name.id, "") + texts(value, names)
        for node in nodes:
            match node:
                case ast.Raise(exc=ast.Call(error, [message, *_])):
                    kind = getattr(error, "attr", getattr(error, "id", ""))  # argparse.ArgumentTypeError has an attr
                    said = texts(message, names)
                    if kind not in CAUGHT | ITS_OWN and len(re.findall("[a-z]", said)) > 5:  # else written elsewhere
                        yield node.lineno, said


def test_every_refusal_says_what_to_do():
    silent, spared = [], set()
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for line, said in messages(path):
            if "fix:" not in said:
                spared.add(file) if file in NO_FIX else silent.append(f"{file}:{line}: {said}")
    assert not silent, "\n".join(silent)
    assert spared == set(NO_FIX), "an exception is needed no longer"
