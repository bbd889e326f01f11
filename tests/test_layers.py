"""The rooms of the package and the order in which they build on each other, read from their imports.

A new room finds its place in ROOMS: as far left as what it imports allows.
"""

import ast
import resource
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from sources import parsed

import scaling

ROOT = Path(scaling.__file__).parent
ROOMS = """
    common < scaling < spec < algebra schedules hardware < configs < cost < mesh < trace < collectives
    < launch tree interop scaled < shard_map explicit < optim data < models < strategies auto profile < train < serve
    < posttrain generate < show < plan < measure < check < book exercise < __main__
"""  # each imports only from those before it
NO_TORCH = {"common", "spec", "algebra", "schedules", "hardware", "configs", "cost", "check", "show", "plan"}
NO_TORCH |= {"exercise"}
JUDGE = "contracts inferred known mode programs results run strategy typed watched"
TORCH_BY_NAME = {"scaling.hardware.systolic", "scaling.common.torch_private", "scaling.exercise.ranks"}
TORCH_BY_NAME |= {f"scaling.check.{name}" for name in JUDGE.split()}  # which runs files
TORCH_BY_NAME |= {f"scaling.plan.{name}" for name in ("choose", "own_run", "transformer_step")}
EXTRAS = "matplotlib safetensors tokenizers huggingface_hub gguf jupytext nbclient nbformat IPython jinja2 starlette"
OPTIONAL = {*f"{EXTRAS} uvicorn h11 prometheus_client".split()}  # of pyproject.toml
RANKS = "scaling.launch scaling.mesh"
INSIDE = {  # a module: what it imports inside functions
    "scaling.cost.lanes": "numpy",  # the playground has none
    "scaling.spec.types": "torch.distributed.tensor torch.distributed.tensor.placement_types",  # without torch
    # plain trees need no torch.distributed:
    "scaling.tree": "scaling.collectives scaling.collectives.checked scaling.collectives.linear",
    "scaling.check.files": "scaling.check.run",  # lines are read without torch
    "scaling.check.run": "scaling.check.programs",  # what it imports then tells the types that it says
    "scaling.configs.sources": "scaling.configs.gguf",  # numpy, which no other model needs
    "scaling.book.options": RANKS,  # chapters without ranks need no torch
    "scaling.book.page": f"torch.distributed {RANKS}",  # the same
    "scaling.collectives.operands": "numpy",  # rarely needed
    "scaling.train.progress": "torch.utils.tensorboard",  # it needs tensorboard, an extra
    "scaling.train.dcp": "torch.distributed.checkpoint",  # it takes a second to import; rank 0 alone writes it
    "scaling.train.command": "scaling.plan.choose",  # a run that is started again plans nothing
    # they need the extra serve:
    "scaling.serve.command": "scaling.serve.web.app scaling.serve.web.server scaling.serve.web.words",
    "scaling.exercise.judge": "scaling.exercise.ranks",  # the site's pages judge the other exercises, without torch
    # a mesh to train on is planned without torch:
    "scaling.plan.__main__": "scaling.plan.own_run",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """A program, which nobody imports, may use what builds on its own room: train/command.py, say, or __main__.py."""
    parts = module.split(".")
    program = parts[-1] == "__main__" or (len(parts) == 3 and parts[-1] == "command")
    return "__main__" if program else parts[1] if len(parts) > 1 else module


@cache
def modules() -> dict[str, ast.Module]:
    return {name_of(path): parsed(path) for path in sorted(ROOT.rglob("*.py"))}


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports: `from scaling.spec import parse` imports scaling.spec."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert not node.level, "relative imports hide where the arrows go"
    whole = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in modules() else str(node.module) for name in whole]


def at_top(tree: ast.Module) -> set[str]:
    """What is imported with the module itself: not under TYPE_CHECKING."""
    return {name for node in tree.body for name in imported(node)}


@cache
def inside(tree: ast.Module) -> set[str]:
    """What is imported by a function, when it is called."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return {name for function in functions for node in ast.walk(function) for name in imported(node)}


def test_arrows_point_one_way():
    place = {name: number for number, rooms in enumerate(ROOMS.split("<")) for name in rooms.split()}
    assert len(place) == len(ROOMS.replace("<", " ").split())  # none stands twice
    for module, tree in modules().items():
        for other in at_top(tree) | (inside(tree) if module != "scaling" else set()):
            if other.split(".")[0] == "scaling" and room(module) != room(other):
                assert place[room(module)] > place[room(other)], f"{module} imports {other}"


def test_no_module_waits_for_itself():
    """No circle of imports, at the top of modules, from file to file."""
    graph = {module: {b for b in at_top(tree) if b in modules()} for module, tree in modules().items()}
    while ready := {module for module, needs in graph.items() if not needs & graph.keys()}:
        graph = {module: needs for module, needs in graph.items() if module not in ready}
    assert not graph, f"in a circle: {sorted(graph)}"


def is_set(node: ast.expr) -> bool:
    """{...}, set(...), or a union or so of one or of a dict's keys."""
    if isinstance(node, ast.BinOp):
        return any(is_set(side) or ast.unparse(side).endswith(".keys()") for side in (node.left, node.right))
    return isinstance(node, ast.Set | ast.SetComp) or ast.unparse(node).startswith(("set(", "frozenset("))


@pytest.mark.parametrize("name", ["strategies", "collectives", "models", "serve", "optim", "tree"])
def test_no_rank_loops_in_an_order_of_its_own(name):
    """A set of names has another order in each process, and in another order ranks make other calls."""
    loops, found = ast.For | ast.comprehension, []
    for module, tree in modules().items():
        nodes = ast.walk(tree) if room(module) == name else ()
        sets = [node for node in nodes if isinstance(node, loops) and is_set(node.iter)]
        found += [(module, ast.unparse(node)) for node in sets if not isinstance(node, ast.For) or sends(node)]
    assert not found


def sends(loop: ast.For) -> bool:
    return not all(isinstance(node, ast.Delete) for node in loop.body)


def test_imports_stand_at_the_top():
    """But for optional packages, and for those listed with their reason."""
    found = {(module, name) for module, tree in modules().items() for name in inside(tree)}
    found = {(module, name) for module, name in found if name.split(".")[0] not in OPTIONAL}
    listed = {(module, name) for module, names in INSIDE.items() for name in names.split()}
    assert found <= listed, sorted(found - listed)
    assert found >= listed, f"no longer there: {sorted(listed - found)}"


def test_optional_packages_are_imported_inside_functions_only():
    """But for the server, which is itself imported where it is asked for, and a program that nobody imports."""
    apart = ("scaling.serve.web", "scaling.models.template_process")
    others = {m: tree for m, tree in modules().items() if not m.startswith(apart)}
    assert not [(m, name) for m, tree in others.items() for name in at_top(tree) if name.split(".")[0] in OPTIONAL]
    assert not [m for m, tree in others.items() for name in at_top(tree) if name.startswith(apart)]


def test_files_that_sweeps_name_exist():
    """tests/sweeps/rooms.toml: parts of the library, by how their paths begin, and the tests that cover them."""
    tests = Path(__file__).parent
    for room, covering in tomllib.loads((tests / "sweeps" / "rooms.toml").read_text(encoding="utf-8")).items():
        assert any(ROOT.glob(f"{room}*")), room
        assert [name for name in covering if not (tests / name).exists()] == [], room


def test_rooms_of_arithmetic_import_no_torch():
    names = {name for name in modules() if room(name) in NO_TORCH} - TORCH_BY_NAME
    code = f"import sys, {', '.join(sorted(names | {'scaling.serve.simulate'}))}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tool", ["show A[I_X,J] --mesh X=2", "show params --mesh X=8,Y=8", "check --help"])
def test_tools_without_torch_start_at_once(tool):
    """In under 0.3 s, of processor time, which other work on the machine disturbs least; it takes 0.05 to 0.1 s."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", *f"scaling.{tool}".split()]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 0.3 for _ in range(6))


def lists_of_names() -> list[tuple[str, ast.expr]]:
    """(module, its `__all__`)"""
    assigned = [(m, node) for m, tree in modules().items() for node in tree.body if isinstance(node, ast.Assign)]
    return [(m, node.value) for m, node in assigned if getattr(node.targets[0], "id", "") == "__all__"]


def test_one_list_of_public_names_a_package():
    """`__all__` stands in a package's __init__, and in files that pass on what others define."""
    lists = {module for module, _ in lists_of_names()}
    packages = {name_of(path) for path in ROOT.rglob("__init__.py")}
    assert lists - packages == {"scaling.models.transformer", "scaling.strategies.pipeline"}


def test_the_public_surface():
    """Every name is there and is what type checkers are told; what is loaded for a name is its own room alone."""
    tree = modules()["scaling"]
    told = {
        alias.asname or alias.name: node.module if node.module != "scaling" else f"scaling.{alias.name}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert {*told, "__version__"} == set(scaling.__all__)
    for name, home in told.items():
        thing = getattr(scaling, name)
        assert thing is sys.modules[home] or thing is getattr(sys.modules[home], name)
    assert {*scaling.__all__} <= {*dir(scaling)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = scaling.nothing
    for name in [name for name in told if told[name] != f"scaling.{name}"]:
        assert getattr(scaling, name).__doc__, name


def test_a_file_holds_one_idea_and_those_of_tests_have_names_of_their_own():
    """A file ends where its idea ends, at about 300 lines; one of more than 400 holds several.

    Tests are imported by their base name alone.
    """
    root = ROOT.parent
    files = [path for room in ("scaling", "chapters", "tests") for path in (root / room).rglob("*.py")]
    assert {path.parent.name for path in files} >= {"scaling", "chapters", "tests"}
    text = {path: path.read_text().splitlines() for path in files}
    for path in (root / "chapters").glob("*.py"):  # whose prose may take what room it needs
        text[path] = [line for line in text[path] if not line.startswith("# ")]
    assert {str(path.relative_to(root)) for path in files if len(text[path]) > 400} == set()
    names = Counter(path.name for path in files if "tests" in path.relative_to(root).parts)
    assert [name for name, count in names.items() if count > 1] == ["conftest.py"]
