"""Faulty edits of typed lines, one at a time. What came of each, outcomes.py keeps.

And others, drawn by a seed, for outcomes.py --fresh: of each literal type in a listing one dim's axes, name or place,
or what it is unreduced over, in one place of its line or wherever the line has it; of each typed call another function,
operand or option, a function around partial sums, or its operand in its place.
"""

import ast
import random
import re
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from sources import replaced

from scaling.check.files import TYPED
from scaling.spec import Line, ShardingError, Spec, parse_line

ROOT = Path(__file__).parents[2]
OF_STRATEGIES = "data_parallel", "fsdp", "tensor_parallel", "fsdp_tp", "pods", "zero"
OF_STRATEGIES += "transformer/layer", "transformer/ends", "one_device"
OF_CHAPTERS = "05_dp", "05_fsdp", "05_tp", "05_fsdp_tp", "05_pods", "05_pp", "05_moe", "05_transformer", "05_context"
OF_CHAPTERS += "03_products", "09_profiling", "10_problems"
OF_FORMS = "heads", "heads_batch", "sequence", "latent", "weights_2d", "experts"
FILES = [f"scaling/strategies/{name}.py" for name in OF_STRATEGIES]
FILES += [f"chapters/{name}.py" for name in OF_CHAPTERS] + [f"scaling/serve/forms/{name}.py" for name in OF_FORMS]
FILES += ["scaling/models/layer.py"]
LISTINGS = {Path(file).stem: [file] for file in FILES[:4]} | {"transformer": [*FILES[6:8], FILES[-1]]}
AXES = (), ("X",), ("Y",), ("X", "Y"), ("Y", "X")
MOVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shard")
AROUND = ("torch.relu({})", "torch.tanh({})", "({}).abs()", "({}).square()", "({}) * ({})", "({}) + 1.0", "({}).exp()")
AROUND += ("torch.softmax({}, -1)", "({}) / ({}).norm()", "({}).clamp(min=0)", "({}) - ({}).amax()")
SAME_TYPE = "another operand, of the same type"  # which no type tells
HEAD = "import torch\nfrom scaling.collectives import all_to_all, shard\n"
HEAD += "from scaling.collectives import all_gather, all_reduce, reduce_scatter\n"
NONLINEAR = ("torch.relu({})", "{} ** 2", "{} + 1.0", 'act({}, "gelu")', "rms_norm({})", "{}.norm()")


class Edit(NamedTuple):
    """What stands in the place of what was before, in a line of a file; the file's text with it."""

    kind: str
    file: str
    line: int
    before: str
    edit: str
    text: str

    @property
    def digest(self) -> str:
        return blake2b(f"{self.file}\n{self.before}\n{self.edit}".encode(), digest_size=6).hexdigest()


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def parts_of(call: ast.Call) -> tuple[str, list[str], list[str]]:
    """(the function, its operands and its options) as text."""
    return call.func.id, list(map(ast.unparse, call.args)), list(map(ast.unparse, call.keywords))


def edits(call: ast.Call):
    """(kind, the call or the text that stands in its place) for each edit of one typed call."""
    (name, (_, *rest), options), text = parts_of(call), call.args[0].value

    def again(line=text, fn=name, operands=rest, options=options):
        return f"{fn}({', '.join([repr(line), *operands, *options])})"

    def at(match: re.Match, instead: str = "") -> str:
        return again(text[: match.start()] + instead + text[match.end() :])

    def of_first(operand: str) -> str:
        return again(operands=[operand, *rest[1:]])

    if name != "einsum":
        yield "collective dropped", rest[0]
    for match in re.finditer(r"(?<!U)_([A-Z]+)(?![A-Za-z\[])", text):
        yield "axis dropped in one type", at(match)
        yield "another axis in one type", at(match, "_Y" if match[1] == "X" else "_X")
    if "_X" in text or "_Y" in text:
        swapped = re.sub("[XY](?=[A-Z]*[\\],} ])", lambda m: "YX"["XY".index(m[0])], text)
        if swapped != text:
            yield "axes swapped in the whole line", again(swapped)
    for match in re.finditer(r" \{U_\w+\}", text):
        yield "{U} dropped", at(match)
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
            yield "nonlinear function of partial sums", of_first(f.format(whole))
        yield "bias on partial sums", of_first(f"{whole} + params['bias']")
        yield "product of partial sums", of_first(f"{whole} * {whole}")
        yield "reduced twice", of_first(again(options=[]))
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


def mutants() -> Iterator[Edit]:
    for file in FILES:
        text = text_of(file)
        text = "import torch\nfrom scaling.models.pointwise import act, rms_norm\n" + text
        for node in typed_calls(ast.parse(text)):
            before = ast.get_source_segment(text, node)
            for kind, edit in dict.fromkeys(edits(node)):
                yield Edit(kind, file, node.lineno - 2, before, edit, replaced(text, node, edit))


def other_types(spec: Spec) -> Iterator[Spec]:
    """Types that differ from one in one thing."""
    for i, (dim, axes) in enumerate(spec.dims):
        for other in (*AXES, *(tuple(a for a in axes if a != axis) for axis in axes)):
            yield Spec(spec.name, (*spec.dims[:i], (dim, other), *spec.dims[i + 1 :]), spec.unreduced)
        for j in range(i):
            other, dims = spec.dims[j], list(spec.dims)
            for here, there in ((other, (dim, axes)), ((dim, other[1]), (other[0], axes))):
                dims[i], dims[j] = here, there
                yield Spec(spec.name, tuple(dims), spec.unreduced)
    for other in (*AXES[:4], *((axis,) for axis in spec.unreduced)):
        yield Spec(spec.name, spec.dims, other)


def other_lines(text: str) -> Iterator[str]:
    """Lines that differ from one in one type; and those in which a dim is split otherwise wherever it stands."""
    line = parse_line(text)
    specs = (*line.operands, line.result)
    for i, spec in enumerate(specs):
        for other in other_types(spec):
            changed = (*specs[:i], other, *specs[i + 1 :])
            yield str(Line(changed[:-1], changed[-1]))
    for dim in dict.fromkeys(dim for spec in specs for dim in spec.dim_names):
        for axes in AXES:
            changed = [Spec(s.name, tuple((d, axes if d == dim else a) for d, a in s.dims), s.unreduced) for s in specs]
            yield str(Line(tuple(changed[:-1]), changed[-1]))


def legal(line: str) -> bool:
    try:
        return bool(parse_line(line))
    except ShardingError:
        return False


def types_in(tree: ast.AST) -> dict[str, set[Spec]]:
    """{name: the types that a file's lines give it}, without the name."""
    texts = [str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    found: dict[str, set[Spec]] = {}
    for line in [parse_line(text) for text in texts if " -> " in text and legal(text)]:
        for spec in (*line.operands, line.result):
            found.setdefault(spec.name, set()).add(spec.with_name(""))
    return found


def of_call(call: ast.Call, text: str, names: set[str], types: dict[str, set[Spec]]) -> Iterator[tuple[str, str]]:
    """(kind, edit) of a typed call of this line: another function, another operand, something around one, an option."""
    fn, rest, options = parts_of(call)

    def again(fn=fn, rest=rest, options=options) -> str:
        return f"{fn}({', '.join([*rest, *options])})"

    def put(i: int, operand: str) -> str:
        return again(rest=[*rest[:i], operand, *rest[i + 1 :]])

    for other in MOVES if fn in MOVES else ():
        if other != fn:
            yield "another function", again(other, options=[o for o in options if "async" in o and other != "shard"])
    declared = parse_line(text).operands if " -> " in text and legal(text) else ()
    for i in range(1, len(rest) if fn == "einsum" else len(rest) - 1):
        for name in sorted(names - {rest[i]}):
            alike = i <= len(declared) and declared[i - 1].with_name("") in types.get(name, ())
            yield SAME_TYPE if alike else "another operand", put(i, name)
        for around in AROUND if i <= len(declared) and declared[i - 1].unreduced else ():
            yield "a function around partial sums", put(i, around.replace("{}", rest[i]))
    if fn in ("all_reduce", "reduce_scatter"):
        for op in ("mean", "max", "min"):
            yield "another op", again(options=[*options, f"op='{op}'"])
    if fn in MOVES:
        yield "a call left out", rest[1]
    if fn == "einsum" and len(rest) == 3:
        yield "operands exchanged", again(rest=[rest[0], rest[2], rest[1]])
    elif not any("async" in option for option in options):
        yield "never waited for", again(options=[*options, "async_op=True"])


def of_file(file: str) -> Iterator[Edit]:
    """As `mutants`, of one file; its line stands before what was before."""
    text = text_of(file)
    tree = ast.parse(text)
    types = types_in(tree)
    for fn in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        stored = {n.id for n in ast.walk(fn) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        given = {arg.arg for arg in fn.args.args} - {"mesh", "block", "at", "into", "saved", "W", "s", "terms"}
        assigned = sorted((n for n in ast.walk(fn) if isinstance(n, ast.Assign)), key=lambda n: n.lineno)
        names = {name for name in stored | given if re.match(r"d?[A-Z]|d[a-z]$|[a-z]$", name)}
        for node in ast.walk(fn):
            found: list[tuple[str, str]] = []
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " -> " in node.value:
                lines = other_lines(node.value) if legal(node.value) else ()
                found = [("another type", repr(line)) for line in lines if legal(line) and line != node.value]
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in TYPED:
                line = node.args[0] if node.args else None
                texts = [a.value for a in assigned if a.lineno < node.lineno and ast.unparse(a.targets[0]) == "line"]
                literal = line if isinstance(line, ast.Constant) else texts[-1] if texts else None
                found = list(of_call(node, str(getattr(literal, "value", "")), names, types))
            before = f"{getattr(node, 'lineno', 0)}: {ast.get_source_segment(text, node) or ''}" if found else ""
            for kind, edit in dict.fromkeys(found):
                yield Edit(kind, file, node.lineno, before, edit, HEAD + replaced(text, node, edit))


def drawn(listing: str, count: int, seed: int) -> list[Edit]:
    """`count` edits of a listing that `mutants` does not make, or all if there are fewer."""
    known = {(each.file, each.line, each.edit) for each in mutants()}
    every = [each for file in LISTINGS[listing] for each in of_file(file)]
    every = [each for each in every if (each.file, each.line, each.edit) not in known]
    return random.Random(seed).sample(every, min(count, len(every)))
