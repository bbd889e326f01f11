"""One name means one thing: public classes everywhere, public functions within a room, and what packages list.

A function is called by its module's name from other rooms, `hf.save` and `checkpoint.save`; within a room two of one
name are two ways to do the same, for one of the reasons below.
"""

import ast
from collections import defaultdict

from test_layers import modules, room

SAME = {  # what the functions of one name in one room have in common: their names
    "a collective: the call, how it is sent, as a ring, compiled; its time on TPUs and on GPUs": {
        "collectives": {"all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "permute", "reduce"}
        | {"reduce_scatter", "scatter"},
        "cost": {"all_gather", "all_reduce", "all_to_all", "data_threshold", "reduce_scatter"},
    },
    "what a strategy has": {
        "strategies": {"attention", "backward", "forward", "gather", "jvp", "layer_backward", "layer_forward", "mlp"}
        | {"reduce", "shard", "specs"},
    },
    "what a form of decoding has, and decoding whose bits no batch changes": {
        "serve": {"attention", "embed", "extend", "head", "mlp", "prefill"},
    },
    "of the byte model, and of a Transformer": {
        "models": {"forward", "init"},
        "train": {"evaluate", "make_step"},
    },
    "of training, and of serving": {
        "cost": {"step"},
        "plan": {"changes", "meshes", "notes", "plans", "rows"},
    },
    "a command, and how its results are written": {
        "__main__": {"arguments", "main"},
        "measure": {"as_dict", "main"},
        "plan": {"as_dict", "main", "table", "text"},
        "show": {"draw", "figure", "main", "save"},
        "train": {"main"},
    },
    "a checkpoint: ours, and torch.distributed.checkpoint's": {
        "train": {"index", "load"},
    },
    "an operation and a whole plan of them are run": {"collectives": {"run"}},
}
LISTED = {  # names that several packages list: why
    "all_gather": "in shard_map as JAX spells it",
    "all_to_all": "in shard_map as JAX spells it",
    "einsum": "of tensors with a line, and of arrays that carry their type",
    "matmul": "planned, and run on arrays that carry their type",
    "specs": "the types of params: of a strategy's, of an engine's",
    "extend": "the same whose bits no batch changes",
    "prefill": "the same whose bits no batch changes",
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


def test_a_class_has_a_name_of_its_own():
    assert not {name: where for name, where in defined(ast.ClassDef).items() if len(where) > 1}


def test_a_function_has_one_meaning_in_its_room():
    twice = {
        (place, name)
        for name, where in defined(ast.FunctionDef).items()
        for place in {room(module) for module in where}
        if sum(room(module) == place for module in where) > 1
    }
    allowed = {(place, name) for rooms in SAME.values() for place, names in rooms.items() for name in names}
    assert twice - allowed == set(), "give each a name of its own"
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
