"""One name means one thing: public classes, type aliases and functions everywhere, and what packages list.

Functions that share a name are ways to do the same, for one of the reasons below, and are called by their module's
name from other rooms: `hf.save` and `checkpoint.save`.
"""

import ast
from collections import defaultdict

from test_layers import modules

SAME = {  # what the public functions of one name have in common: their names
    "a collective: the call, how it is sent, as a ring, compiled, drawn, by JAX's name; its time on TPUs and on GPUs": {
        "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "permute", "ppermute", "reduce",
        "reduce_scatter", "scatter", "masked", "data_threshold",
    },
    "one operation: planned, run, on arrays that carry their type, its time": {
        "einsum", "layer", "matmul", "reshard", "vjp",
    },
    "what a strategy, a form of decoding and a model have": {
        "attention", "backward", "embed", "forward", "head", "init", "layer_backward", "layer_forward",
        "loss", "loss_and_grads", "mlp", "specs",
    },
    "whole arrays and shards: of one array, of a tree, of a Transformer's params": {"shard", "unshard"},
    "training's, and serving's: the cost of a step, the scheduler's step, what is planned, what is simulated": {
        "evaluate", "meshes", "plans", "simulate", "step",
    },
    "a command and its parts; it is run": {"arguments", "main", "run"},
    "results, written: as JSON, text, a table, a picture, a file": {
        "as_dict", "draw", "figure", "load", "save", "table", "text",
    },
}  # fmt: skip
LISTED = {  # names that several packages list: why
    "all_gather": "in shard_map as JAX spells it",
    "all_to_all": "in shard_map as JAX spells it",
    "einsum": "of tensors with a line, and of arrays that carry their type",
    "matmul": "planned, and run on arrays that carry their type",
    "specs": "the types of params: of a strategy's, of an engine's",
    "plans": "for training, and for serving",
    "main": "a command",
}


def defined(kind) -> dict[str, list[str]]:
    """{name: modules} of public classes or functions at the top of modules."""
    found = defaultdict(list)
    for module, tree in modules().items():
        for name in {node.name for node in tree.body if isinstance(node, kind) and not node.name.startswith("_")}:
            found[name].append(module)
    return found


def aliases() -> dict[str, list[str]]:
    """{name: modules} of public type aliases: `Axes = tuple[str, ...]`, named as a class is."""
    found = defaultdict(list)
    for module, tree in modules().items():
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = getattr(target, "id", "_")
            if name[0].isupper() and len(name) > 1 and not name.isupper() and "_" not in name:
                found[name].append(module)
    return found


def test_a_type_has_a_name_of_its_own():
    types = defined(ast.ClassDef)
    for name, where in aliases().items():
        types[name] += where
    assert {"Axes", "Schedule", "Event"} <= types.keys(), "both kinds are found"
    assert not {name: where for name, where in types.items() if len(where) > 1}


def test_a_function_has_one_meaning():
    twice = {name for name, where in defined(ast.FunctionDef).items() if len(where) > 1}
    allowed = set().union(*SAME.values())
    assert twice - allowed == set(), "give each a name of its own, or an underscore where no other module uses it"
    assert allowed - twice == set(), "no longer there twice"


def test_packages_list_a_name_once():
    packages = {module.rpartition(".")[0] for module in modules()} - {"", "scaling"}
    found = defaultdict(set)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                for name in ast.literal_eval(node.value) if module in packages else ():
                    found[name].add(module)
    twice = {name for name, where in found.items() if len(where) > 1}
    assert twice == LISTED.keys(), twice ^ LISTED.keys()
