"""Right programs: the files of mutants.py with random edits that change no number. The judge finds nothing in them, and
`outcomes.py --right` runs them on ranks beside the right program."""

import ast
import random

from mutants import FILES, ROOT, typed_calls

from scaling.spec import parse_line

HEAD = "import torch\nfrom scaling import tree\nfrom scaling.collectives import wait\n"
HEAD += "from scaling.strategies.axes import all_gather as gathered, reduce_scatter as scattered\n\n\n"
HEAD += "def passed(x):\n    return x\n\n\ndef paired(x, y=None):\n    return x, y\n\n\n"
SAME = (  # of an array, whatever it is
    "{}.clone()", "1.0 * {}", "{} / 1", "{} + 0", "-(-{})", "({}).contiguous()", "({},)[0]", "[{}][-1]",
    "dict(x={})['x']", "passed({})", "paired({})[0]", "(lambda x: x)({})", "next(iter([{}]))", "({}).to(({}).dtype)",
    "list(map(passed, [{}]))[0]", "tree.map(passed, {{'x': {}}})['x']", "torch.stack([{}, {}])[1]",
    "{} if True else {}",
    "torch.zeros_like({}) + {}", "({}).view(({}).shape)", "({}) - 0 * ({})",
)  # fmt: skip


def same(call: ast.Call, rng: random.Random) -> str:
    """A call's result, or its operand, through a function that changes nothing."""
    shape, name = rng.choice(SAME), ast.unparse(call)
    if name.count("async_op=True") or name.count("defer=True"):
        return name
    return shape.replace("{}", name) if "{{" not in shape else shape.format(name)


def text_elsewhere(call: ast.Call, rng: random.Random) -> str:
    """The line in another form of text."""
    half = rng.randrange(1, len(call.args[0].value) - 1)
    line = call.args[0].value
    one, other = repr(line[:half]), repr(line[half:])
    forms = (
        f"{one} + {other}",
        f'"".join([{one}, {other}])' if rng.random() < 0.1 else f"{one} {other}",
        repr(f" {line}"),
    )
    return rebuilt(call, rng.choice(forms))


def rebuilt(call: ast.Call, line: str, operands=None, name: str = "") -> str:
    operands = [ast.unparse(a) for a in call.args[1:]] if operands is None else operands
    return f"{name or ast.unparse(call.func)}({', '.join([line, *operands, *(ast.unparse(k) for k in call.keywords)])})"


def swapped(call: ast.Call, rng: random.Random) -> str:
    """A product with its operands exchanged, and their types with them."""
    if call.func.id != "einsum" or len(call.args) != 3 or call.keywords:
        return ast.unparse(call)
    line = parse_line(call.args[0].value)
    a, b = line.operands
    x, y = (ast.unparse(operand) for operand in call.args[1:3])
    return rebuilt(call, repr(f"{b} * {a} -> {line.result}"), [y, x])


def renamed(call: ast.Call, rng: random.Random) -> str:
    """The result by another name; a name says nothing of a type."""
    if "->" not in call.args[0].value:
        return ast.unparse(call)
    line = parse_line(call.args[0].value)
    operands = " * ".join(map(str, line.operands))
    return rebuilt(call, repr(f"{operands} -> {line.result.with_name('R')}"))


def in_two_steps(call: ast.Call, rng: random.Random) -> str:
    """An AllReduce as a ReduceScatter and an AllGather; an AllGather that is waited for."""
    name, line = call.func.id, call.args[0].value
    if name == "all_gather" and not call.keywords:
        return f"wait({ast.unparse(call)[:-1]}, async_op=True))"
    if name != "all_reduce" or call.keywords:
        return ast.unparse(call)
    before, after = parse_line(line).operands[0], parse_line(line).result
    free = [dim for dim, axes in before.dims if not axes and dim in ("D", "F", "B")]
    if not free:
        return ast.unparse(call)
    part = after.with_axes(free[-1], [axis for axis in before.unreduced if axis not in after.unreduced])
    x, mesh = (ast.unparse(a) for a in call.args[1:3])
    inner = f"scattered({f'{before} -> {part}'!r}, {x}, {mesh})"
    return f"gathered({f'{part} -> {after}'!r}, {inner}, {mesh})"


def operand_same(call: ast.Call, rng: random.Random) -> str:
    operands = [ast.unparse(a) for a in call.args[1:]]
    if any("async_op" in x or "donate" in ast.unparse(call) for x in operands) or call.func.id != "einsum":
        return ast.unparse(call)
    at = rng.randrange(len(operands))
    operands[at] = f"passed({operands[at]})" if rng.random() < 0.5 else f"paired({operands[at]})[0]"
    return rebuilt(call, ast.unparse(call.args[0]), operands)


EDITS = (same, same, text_elsewhere, swapped, renamed, in_two_steps, operand_same)


def variants(count: int, seed: int):
    """(file, what was edited, its text): `count` files, each with two to five edits, no two the same."""
    rng, seen = random.Random(seed), set()
    while len(seen) < count:
        file = rng.choice(FILES)
        text = right = (ROOT / file).read_text(encoding="utf-8")
        done = []
        for _ in range(rng.randrange(2, 6)):
            call, edit = rng.choice(typed_calls(ast.parse(text))), rng.choice(EDITS)
            before, after = ast.get_source_segment(text, call), edit(call, rng)
            text = text.replace(before, after, 1)
            done.append(after)
        if text in seen or text == right:
            continue
        seen.add(text)
        first = next(i for i, line in enumerate(text.splitlines()) if line.startswith(("import", "from")))
        lines = text.splitlines(keepends=True)
        yield file, done, "".join([*lines[:first], HEAD, *lines[first:]])
