"""Faulty edits of typed lines, one at a time. What came of each, outcomes.py keeps."""

import ast
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from sources import replaced

from scaling.check.lines import TYPED

ROOT = Path(__file__).parents[2]
FILES = ["data_parallel", "fsdp", "tensor_parallel", "fsdp_tp", "pods", "zero", "transformer/layer", "transformer/ends"]
FILES += ["one_device"]
FILES = [f"scaling/strategies/{name}.py" for name in FILES]
FILES += [
    f"chapters/05_{name}.py" for name in ("dp", "fsdp", "tp", "fsdp_tp", "pods", "pp", "moe", "transformer", "context")
]
FILES += [f"chapters/{name}.py" for name in ("03_products", "09_profiling", "10_problems")]
FILES += [
    f"scaling/serve/forms/{name}.py"
    for name in ("heads", "heads_batch", "sequence", "context", "weights_2d", "experts")
]
NONLINEAR = ("torch.relu({})", "{} ** 2", "{} + 1.0", 'act({}, "gelu")', "rms_norm({})", "{}.norm()")


def edits(call: ast.Call):
    """(kind, the call or the text that stands in its place) for each edit of one typed call."""
    name, text, rest = call.func.id, call.args[0].value, [ast.unparse(a) for a in call.args[1:]]
    options = [ast.unparse(k) for k in call.keywords]

    def again(line=text, fn=name, operands=rest, options=options):
        return f"{fn}({', '.join([repr(line), *operands, *options])})"

    if name != "einsum":
        yield "collective dropped", rest[0]
    for match in re.finditer(r"_([A-Z]+)(?![A-Za-z\[])", text):
        before, after = text[: match.start()], text[match.end() :]
        if not before.endswith("U"):
            yield "axis dropped in one type", again(before + after)
            yield "another axis in one type", again(before + ("_Y" if match[1] == "X" else "_X") + after)
    if "_X" in text or "_Y" in text:
        swapped = re.sub("[XY](?=[A-Z]*[\\],} ])", lambda m: "YX"["XY".index(m[0])], text)
        if swapped != text:
            yield "axes swapped in the whole line", again(swapped)
    for match in re.finditer(r" \{U_\w+\}", text):
        yield "{U} dropped", again(text[: match.start()] + text[match.end() :])
    if "{U" not in text.split("->")[-1]:
        yield "{U} added", again(text + " {U_X}")
    if name == "einsum" and len(rest) == 2:
        yield "operands swapped", again(operands=rest[::-1])
    if name == "reduce_scatter":
        yield "shard for reduce_scatter", again(re.sub(r" \{U_\w+\}", "", text), "shard", options=[])
    if name in ("reduce_scatter", "all_reduce"):
        whole = f"({rest[0]})" if isinstance(call.args[1], ast.BinOp) else rest[0]
        others = [option for option in options if not option.startswith("op=")]
        yield "mean for sum", again(options=others if "op='mean'" in options else [*others, "op='mean'"])
        for f in NONLINEAR:
            yield "nonlinear function of partial sums", again(operands=[f.format(whole), *rest[1:]])
        yield "bias on partial sums", again(operands=[f"{whole} + params['bias']", *rest[1:]])
        yield "product of partial sums", again(operands=[f"{whole} * {whole}", *rest[1:]])
        twice = re.sub(r" -> (\w+)", r" -> \1", text)
        yield "reduced twice", again(operands=[again(twice, options=[]), *rest[1:]])
    if "donate=True" in options:
        yield "used after donation", f"({again(options=['donate=True'])}, {rest[0]})[1]"
    for i, operand in enumerate(rest[:-1] if name != "einsum" else rest):
        if operand in ("W_in", "W_out"):
            other = "W_out" if operand == "W_in" else "W_in"
            yield "another weight", again(operands=[*rest[:i], other, *rest[i + 1 :]])
    if match := re.search(r"_([XY])(?=[,\]])", text):
        other = "Y" if match[1] == "X" else "X"
        before, after = (part.replace("{", "{{").replace("}", "}}") for part in text.split(match[0], 1))
        call = ", ".join([f'f"{before}_{{{other!r}}}{after}"', *rest, *options])
        yield "another axis, in an f-string", f"{name}({call})"
    if name == "all_gather" and not options:
        yield "no wait", again(options=["async_op=True"])


def typed_calls(tree: ast.AST) -> list[ast.Call]:
    """Those of typed functions by their names, with a literal line."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") in TYPED]
    return [call for call in calls if call.args and isinstance(call.args[0], ast.Constant)]


def mutants():
    """(kind, file, line, the call before, the edit, the file's text with it)."""
    for file in FILES:
        text = (ROOT / file).read_text(encoding="utf-8")
        text = "import torch\nfrom scaling.models.pointwise import act, rms_norm\n" + text
        tree = ast.parse(text)
        for node in typed_calls(tree):
            before = ast.get_source_segment(text, node)
            for kind, edit in dict.fromkeys(edits(node)):
                yield kind, file, node.lineno - 2, before, edit, replaced(text, node, edit)
