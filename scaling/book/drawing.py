"""Draw the listings of a file, frame by frame: `python -m scaling.show listing FILE --mesh X=2,Y=2`.

    python -m scaling.show listing chapters/05_fsdp_tp.py --mesh X=2,Y=2      in the terminal
    python -m scaling.show listing my_layer.py --mesh X=4 --plot layer.svg     SVGs that play: layer-forward.svg, ...

A listing is a strategy, which has SPECS, `forward` and `backward`, or a function whose docstring gives the type of each
of its arguments, `x[B_X, D], W[D, F] -> y[B_X, F].` It runs on shapes alone. Of the file only imports, functions,
classes and the types in SPECS are run, so a chapter's other cells are left out.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from scaling.book.arrays import empty
from scaling.book.listing import both_passes
from scaling.check.contracts import typed_arguments
from scaling.common.console import Parser, complaining, picture
from scaling.mesh import AbstractMesh
from scaling.show import svg
from scaling.show.frames import LineFrame, frames_of, text
from scaling.spec import Spec, parse
from scaling.spec.sizes import parse_mesh
from scaling.strategies.stack import Strategy
from scaling.trace import trace

SPLIT = 16  # each dim has 16 times as many elements as the mesh has devices


def frames_of_strategy(strategy, mesh) -> dict[str, list[LineFrame]]:
    """Return the frames of a strategy's forward and backward through one layer."""
    types = {name: parse(spec) for name, spec in strategy.SPECS.items()}
    sizes = dict.fromkeys((dim for spec in types.values() for dim in spec.dim_names), SPLIT * mesh.size())
    there, back = both_passes(strategy, sizes, mesh)
    weights = [spec for name, spec in types.items() if name not in ("In", "Out")]
    dOut = Spec("dOut", types["Out"].dims, types["Out"].unreduced)
    return {
        "forward": frames_of(there.events, [*weights, types["In"]]),
        "backward": frames_of(back.events, [*weights, dOut]),
    }


def frames_of_function(fn, types: "Mapping[str, Spec | None]", mesh) -> list[LineFrame]:
    """Return the frames of a function whose arguments, by name, have these types; None is the mesh."""
    specs = [spec for spec in types.values() if spec]
    sizes = {dim: SPLIT * mesh.size() for spec in specs for dim in spec.dim_names}
    with trace() as log:
        fn(**{name: empty(spec, sizes, mesh, torch.float32) if spec else mesh for name, spec in types.items()})
    return frames_of(log.events, specs)


def listings(path: "str | Path", mesh) -> dict[str, list[LineFrame]]:
    """Return the frames of each listing in a file, by its name.

    Raises:
        ValueError: the file has no listing that lies on this mesh.
    """
    module: Any = ModuleType("listing")
    module.__file__ = str(path)
    tree = ast.parse(Path(path).read_bytes(), str(path))
    wanted = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    for node in tree.body:
        targets = [each.id for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)]
        if isinstance(node, wanted) or {*targets} & {"SPECS", "STRATEGY"}:
            # A NameError is of a decorator or default that one of the other cells makes.
            with _running(f"{path}: line {node.lineno}"), suppress(NameError):
                exec(compile(ast.Module([node], []), str(path), "exec"), vars(module))
    if isinstance(getattr(module, "SPECS", None), dict) and callable(getattr(module, "forward", None)):
        own = getattr(module, "STRATEGY", None) or Strategy(module.SPECS, module.forward, module.backward)
        with _running(f"{path}: the strategy"):
            return frames_of_strategy(own, mesh)
    found = {}
    for fn in [fn for fn in vars(module).values() if inspect.isfunction(fn) and fn.__module__ == "listing"]:
        if types := typed_arguments(fn):
            with _running(f"{path}: {fn.__name__}"):
                found[fn.__name__] = frames_of_function(fn, types, mesh)
    if not found:
        raise ValueError(
            f"{path} has no listing: neither SPECS, forward and backward, nor a function whose docstring gives the "
            'type of each argument\n  fix: begin its docstring as in "x[B_X, D], W[D, F] -> y[B_X, F]."'
        )
    return found


@contextmanager
def _running(what: str) -> Iterator[None]:
    """Raise a ValueError in words for whatever the file's own code raises."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{what} raises {type(error).__name__}: {said}\n"
            "  fix: make it run on shapes alone: a listing's arrays are on the device `meta`, without values"
        ) from error


@complaining(ValueError, OSError, SyntaxError)
def main(argv: "list[str] | None" = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m scaling.show listing", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", help="a Python file, such as chapters/05_fsdp_tp.py")
    parser.add_argument("--mesh", default="X=2,Y=2", help="mesh axes and their sizes (default X=2,Y=2)")
    parser.add_argument(
        "--plot",
        type=partial(picture, ends=(".svg",)),
        metavar="FILE.svg",
        help="write SVGs instead, which play the lines",
    )
    args = parser.parse_args(argv)
    mesh = AbstractMesh(parse_mesh(args.mesh))
    found = listings(args.file, mesh)
    for name, frames in found.items():
        title = f"{Path(args.file).name}: {name}, on {args.mesh}"
        if not args.plot:
            print(f"{title}\n{'-' * len(title)}\n{text(frames, mesh)}\n")
            continue
        path = Path(args.plot)
        path = path.with_stem(f"{path.stem}-{name}") if len(found) > 1 else path
        path.write_text(svg.played(frames, mesh, title), encoding="utf-8")
        print(f"wrote {path}")
    return 0
