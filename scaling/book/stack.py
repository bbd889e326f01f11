"""The stages of a program on its way to the machine (Part 9): torch's layers, where JAX has StableHLO, HLO and LLO.

dispatched(f, x)    eager: the operations in the order in which they run
graph(f, x)         make_fx: the operations as a graph, not run; `listing` writes it as XLA writes its own
joint(f, x)         AOTAutograd: two graphs, forward and backward, with the values saved between them
generated(f, x)     inductor: the code that it writes for this machine
"""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from scaling.common.torch_private import TorchDispatchMode, aot_graphs, inductor_code

PRODUCTS = {"bmm", "mm", "addmm", "einsum"}
LAYOUT = {"view", "permute", "unsqueeze", "squeeze", "transpose", "t", "expand", "reshape"}
STORED = Path(__file__).with_name("inductor.txt")  # the result of `generated` for the chapter's program
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float64: "f64", torch.int64: "s64"}


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


def dispatched(fn: Callable, *args) -> list[str]:
    """Return the names of the operations that a call runs, in order."""
    with _Names() as names:
        fn(*args)
    return names.found


def graph(fn: Callable, *args) -> torch.fx.Graph:
    """Return the operations as a graph, with each one's operands and its result's shape and dtype."""
    return make_fx(fn, tracing_mode="fake")(*args).graph


def _name_of(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).partition(".")[0]


def kinds(graph: torch.fx.Graph) -> Counter:
    """Return the number of inputs, products, changes of layout and pointwise operations."""
    found: Counter = Counter()
    for node in graph.nodes:
        name = _name_of(node)
        if node.op == "placeholder":
            found["input"] += 1
        elif node.op == "call_function":
            found["product" if name in PRODUCTS else "layout" if name in LAYOUT else "pointwise"] += 1
    return found


def listing(graph: torch.fx.Graph) -> str:
    """Return the graph as text, an operation a line: `%bmm = f32[1,16,128] bmm(%view, %view_1)`."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {', '.join(f'%{source.name}' for source in node.all_input_nodes)}")
            continue
        value = node.meta.get("val")
        shape = "" if value is None else f"{DTYPES[value.dtype]}[{','.join(map(str, value.shape))}] "
        operands = ", ".join(f"%{a.name}" if isinstance(a, torch.fx.Node) else str(a) for a in node.args)
        what = "parameter()" if node.op == "placeholder" else f"{_name_of(node)}({operands})"
        lines.append(f"%{node.name} = {shape}{what}")
    return "\n".join(lines)


def joint(fn: Callable, *args) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """Return AOTAutograd's graphs of the forward and the backward pass; args[0] is differentiated."""
    first, *rest = args
    return aot_graphs(fn, first.detach().clone().requires_grad_(), *rest)


def generated(fn: Callable, *args) -> str:
    """Return the kernels and the calls that inductor writes, without the frame that every program has."""
    code = inductor_code(fn, *args)
    kernels = re.findall(r"^(\w+) = async_compile.*?r?'''\n(.*?)^'''", code, re.MULTILINE | re.DOTALL)
    calls = re.search(r"^    def call\(self, args\):\n(.*?)^\s*return ", code, re.MULTILINE | re.DOTALL)
    text = "\n".join(f"# {name}\n{body}" for name, body in kernels)
    return text + "\n# call\n" + (calls[1] if calls else "")
