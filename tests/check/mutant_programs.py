"""Small programs that run the lines of each file of mutants.py, and of the museum's latent.py: on ranks for
outcomes.py, and to be judged."""

import ast
import importlib
import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch.func import vjp

from scaling import optim, serve, tree
from scaling.check import judged
from scaling.check.contracts import run_watched
from scaling.check.findings import Judgement
from scaling.check.run import looked_at_alone
from scaling.check.strategy import run_layers
from scaling.collectives import all_reduce
from scaling.configs import Config, Latent
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.spec import ShardingError, parse
from scaling.spec.sizes import parse_mesh
from scaling.strategies import transformer
from scaling.strategies.stack import Strategy

SIZES = {"L": 2, "B": 8, "D": 8, "F": 16}
MODEL = Config("tiny", 1, 32, 64, 8, 4, 4, 16).with_(window=(3,), attention_bias=True, output_bias=True)
LATENT = MODEL.with_(K=8, attention_bias=False, output_bias=False, latent=Latent(16, 12, 6, 4, 4))
OF_MODELS = "transformer/", "expert/", "models/"  # parts of the names of files that Transformers run
# of a file by a part of its name
MESHES = {"pods": "P=2,X=2,Y=1", "05_moe": "X=4", "05_context": "C=4", "05_pp": "Z=4", "10_problems": "Y=4"}
MESHES |= {"forms/heads": "Y=2,Z=2,C=2", "forms/latent": "Y=2,Z=2,C=2", "forms/sequence": "Y=2,Z=2"}
MESHES |= {"forms/weights_2d": "X=2,Y=2,Z=2", "forms/experts": "E=2,Y=2"}


def mesh_of(file: str) -> dict[str, int]:
    return parse_mesh(next((sizes for part, sizes in MESHES.items() if part in file), "X=2,Y=2"))


def listed(file: str, text: str, mesh) -> ModuleType:
    """A strategy's file, or of a chapter what stands before it runs its first ranks: imports, values and functions."""
    module, parsed = ModuleType("edited"), ast.parse(text)
    if "page.end()" in text:
        options = {"seed": 0, "steps": 1, "batch": 32, "text": "", "microbatches": 8, "tick": 0.0, "compile": 0}
        module.page = SimpleNamespace(small=True, args=SimpleNamespace(mesh=dict(mesh.sizes), **options))
        before = text[: text.index("page.on_ranks")].count("\n") if Path(file).stem in CHAPTERS else 0

        def kept(node: ast.stmt) -> bool:
            if not isinstance(node, ast.Assign):
                return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))
            said = ast.unparse(node)
            if said.startswith(("SPECS", "STORED", "USED")):
                return True
            # what needs the page, or a table that a loop fills, which is not run
            return node.lineno <= before and not re.search(r"page(?!\.args|\.small)|flops\[", said)

        parsed.body = list(filter(kept, parsed.body))
    run_watched(text, "edited", module.__dict__, parsed)
    return module


def normals(*shapes, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def of_strategy(mesh, module: ModuleType):
    """Two layers with gelu, norm and residual: the result, and all gradients; of ZeRO also the update."""
    strategy = getattr(module, "STRATEGY", None) or Strategy(module.SPECS, module.forward, module.backward)
    types = [module.SPECS[name].replace("[", "[L, ") for name in ("W_in", "W_out")]
    types += [module.SPECS["In"], module.SPECS["Out"].replace("Out", "dOut")]
    W_in, W_out, In, dOut = tree.shard(normals(*(parse(text).global_shape(SIZES) for text in types)), types, mesh)
    arrays = {"W_in": W_in, "W_out": W_out}
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
    parts = {"fc1": torch.nn.Linear(8, 16), "act": torch.nn.GELU(), "fc2": torch.nn.Linear(16, 8)}
    own = torch.nn.Sequential(OrderedDict(parts))
    whole = {name: W.detach().double() for name, W in own.named_parameters()}
    (x,) = normals((8, 8), seed=1)
    rows = "x[B_X, D]" if "Y" not in str(module.STORED) else "x[B, D]"
    return module.gradients(own.double(), tree.shard(whole, module.STORED, mesh), tree.shard(x, rows, mesh), mesh)


ORIGINALS: dict[str, dict] = {}  # what the modules that were edited held before


def replace(module: ModuleType, text: str) -> None:
    """Run another text in a module, and give what it defines to all that had imported it from there."""
    ORIGINALS.setdefault(module.__name__, dict(vars(module)))
    before = dict(vars(module))
    run_watched(text, str(module.__file__), vars(module))
    _hand_on(module, before, vars(module))


def restore(module: ModuleType) -> None:
    """Give a module, and all that had imported from there, what it held before its text was edited."""
    before, original = dict(vars(module)), ORIGINALS[module.__name__]
    vars(module).clear()
    vars(module).update(original)
    _hand_on(module, before, vars(module))


def _hand_on(module: ModuleType, before: dict, now: dict) -> None:
    """Give what a module defines now to all that have what it defined before."""
    names = {id(x): key for key, x in before.items() if getattr(x, "__module__", "") == module.__name__}
    for other in [m for name, m in sys.modules.items() if name.startswith("scaling.")]:
        for key, value in list(vars(other).items()):
            if names.get(id(value)) in now:
                setattr(other, key, now[names[id(value)]])


def of_transformer(mesh, name: str, text: str):
    """The loss and gradients of tiny Transformers: with biases, tied, with experts; a file of theirs edited."""
    replace(importlib.import_module(name), text)
    found = []
    for config in (LATENT,) if name.endswith(".latent") else (MODEL, MODEL.with_(tied=True), MODEL.with_(E=2, k=1)):
        params = transformer.shard(model.init(config, 0, torch.float64), config, mesh)
        g = torch.Generator().manual_seed(0)
        tokens, targets = (torch.randint(0, config.V, (4, 8), generator=g) for _ in range(2))
        weights = torch.rand(4, 8, generator=g, dtype=torch.float64)
        tokens, targets, weights = tree.shard([tokens, targets, weights], ["t[B_X, T]"] * 3, mesh)
        options = {"weights": weights, "label_smoothing": 0.1, "z_loss": 0.01}
        found.append(transformer.loss_and_grads(params, tokens, targets, config, mesh, **options))
        if name.endswith(".ends") and config.E == 1:
            loss, (hidden, U) = importlib.import_module(name).loss, normals((4, 8, config.D), (config.D, config.V))
            hidden, U = tree.shard([hidden, U], ["x[B_X, T, D]", "U[D, V_Y]"], mesh)
            own, pull = vjp(lambda x, U, f=loss, t=targets, w=weights: f(x, U, t, mesh, weights=w), hidden, U)
            types = "Loss[] {U_XY}", "dx[B_X, T, D] {U_Y}", "dU[D, V_Y] {U_X}"
            for text, x in zip(types, (own, *pull(torch.ones_like(own))), strict=True):
                found.append(all_reduce(f"{text} -> {text.partition(' {')[0]}", x, mesh))
    return found


def of_serving(mesh, name: str, text: str):
    """The logits of a prompt and of a token after it, by one form of serving: its file edited."""
    replace(importlib.import_module(f"scaling.serve.forms.{name}"), text)
    form = {"weights_2d": "2d", "latent": "heads"}.get(name, name)
    g, found = torch.Generator().manual_seed(0), []
    tokens = torch.randint(0, MODEL.V, (8, 6), generator=g)
    plain = MODEL.with_(window=None, attention_bias=False, gated=False, tied=True)
    special = {"experts": (MODEL.with_(E=4, k=2),), "latent": (LATENT,)}
    for config in special.get(name, (MODEL, plain)):
        params = model.init(config, 0, torch.float64)
        params = tree.map(lambda p: p + 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype), params)
        params = tree.shard(params, serve.specs(config, mesh, form=form), mesh)
        cache = serve.init_cache(config, 8, 8, mesh=mesh, form=form)
        logits, cache = serve.prefill(params, tokens, cache, config, mesh, form=form)
        found += [logits, serve.decode(params, tokens[:, 0], cache, config, mesh, form=form)[0]]
    return found


def of_context(mesh, module: ModuleType):
    """The ring, forward and backward, in both orders; Ulysses and its gradients."""
    Q, key, V, dO, _ = problem = [x[:, : module.T] for x in module.problem()]
    found = []
    for order in ("plain", "zig-zag"):
        Q, key, V, dO, _ = (x[:, module.places(order, mesh.coord["C"])] for x in problem)
        Q, dO, KV = Q.unflatten(2, (module.K, -1)), dO.unflatten(2, (module.K, -1)), torch.stack([key, V])
        O, logL = module.forward(Q, KV, mesh, order)
        found += [O, logL, *module.backward(dO, O, logL, Q, KV, mesh, order)]
    R = KV.repeat_interleave(module.C, 3)
    O, pull = vjp(lambda Q, R: module.ulysses(Q, R, mesh, module.dense), Q.flatten(2, 3), R)
    return [*found, O, *pull(dO.flatten(2, 3))]


def of_stages(mesh, module: ModuleType):
    """The book's listing beside one device, and the first step of a training run."""
    module.ADAMW = optim.adamw(3e-3)
    return [*(apart for _, apart, _ in module.book(mesh, 0)), *module.training(mesh, module.page.args)[:2]]


def of_layer(mesh, module: ModuleType):
    """A chapter's layer beside one device: how far its results are apart; of experts also their choices and bytes."""
    found = looked_at_alone(module.one_layer(mesh), module.one_layer)
    return [[apart for _, apart, _ in found["differences"]], found.get("experts", []), found.get("bytes", [])]


def of_pods(mesh, module: ModuleType) -> list[torch.Tensor]:
    (dW,) = normals((8, 8), seed=mesh.rank)  # which the first may change
    return [module.grads_of_layer(dW.clone(), mesh), module.grads_of_layer_flat(dW, mesh)]


def of_problems(mesh, module: ModuleType):
    whole = normals((8, 16), (16, 32), (32, 16))
    Out = module.block(mesh, *tree.shard(whole, ["In[B, D_Y]", "W[D, F_Y]", "W[F_Y, D]"], mesh))
    whole = [*normals((8, 16), (8, 16, 32)), torch.arange(16).view(8, 2) % 8]
    A, W, experts = tree.shard(whole, ["A[S_Y, D]", "W[E_Y, D, F]", "B[S_Y, K]"], mesh)
    return [Out, module.gathered(A, W, experts, mesh), module.ragged(A, W, experts, mesh, chunk=2)]


CHAPTERS = {
    "05_pods": of_pods,
    "05_moe": of_layer,
    "05_transformer": of_layer,
    "05_context": of_context,
    "05_pp": of_stages,
    "10_problems": of_problems,
    "03_products": lambda mesh, module: module.question_9(mesh)[1],
    "09_profiling": lambda mesh, module: module.block(*module.arrays(mesh), mesh),
}


def program(mesh, file: str, text: str) -> torch.Tensor:
    """What a file's program gives on this rank, as one flat vector."""
    name = Path(file).stem
    if any(part in file for part in OF_MODELS):
        results = of_transformer(mesh, file.removesuffix(".py").replace("/", "."), text)
    elif "serve/" in file:
        results = of_serving(mesh, name, text)
    elif name in CHAPTERS:
        results = CHAPTERS[name](mesh, listed(file, text, mesh))
    else:
        module = listed(file, text, mesh)
        results = [of_strategy(mesh, module), of_module(mesh, module) if hasattr(module, "gradients") else []]
    return torch.cat([torch.as_tensor(x).flatten().double() for x in tree.leaves(results)])


def judgement(file: str, text: str) -> Judgement:
    """The judge's, of a file's program on an abstract mesh: what its end does with values, which there are none of, may
    fail."""
    mesh = AbstractMesh(mesh_of(file))
    with judged(mesh) as report:
        try:
            program(mesh, file, text)
            if "SPECS = " in text and Path(file).stem not in CHAPTERS:  # as of any file that has one
                module = listed(file, text, mesh)
                module.__file__ = file
                run_layers(module, True, mesh)
        except ShardingError:
            raise
        except NameError as error:
            raise ShardingError(str(error)) from None
        except Exception:
            pass
    if any(part in file for part in (*OF_MODELS, "serve/")):
        restore(sys.modules[file.removesuffix(".py").replace("/", ".")])
    return report
