"""Each faulty edit of tests/check/mutants.py run once on ranks beside the right program, and what came of it.

    python tests/check/outcomes.py              runs those that are not in outcomes.txt yet, and adds them
    python tests/check/outcomes.py --report     what the judge finds of those that change numbers, by kind
    python tests/check/outcomes.py --fresh 200 --seed 1     the same of 200 others a strategy, drawn and run here
    python tests/check/outcomes.py --right 20   judges right variants of 20 files, and runs them: each must be "same"

An edit's outcome is "same" (no number changes), "wrong" (numbers change and nothing is said) or "raises". The file
holds a line an edit: its digest and outcome.
"""

import ast
import random
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from mutant_programs import judgement, mesh_of, program
from mutants import FILES, LISTINGS, SAME_TYPE, Edit, drawn, mutants, parts_of, text_of, typed_calls

from scaling import launch
from scaling.common.console import Parser
from scaling.spec import parse_line

STORED = Path(__file__).parent / "outcomes.txt"
TOGETHER, SECONDS = 24, 20  # edits that share their ranks; how long these wait for one another
FORMS = "operands exchanged", "another name", "in two steps", "an operand within another call"
FORMS += ("the line as other text", "within another call", "within another call")  # this one twice as often
SAME = (  # of an array, whatever it is
    "{}.clone()", "1.0 * {}", "{} / 1", "{} + 0", "-(-{})", "({}).contiguous()", "({},)[0]", "[{}][-1]",
    "dict(x={})['x']", "passed({})", "paired({})[0]", "(lambda x: x)({})", "next(iter([{}]))", "({}).to(({}).dtype)",
    "list(map(passed, [{}]))[0]", "tree.map(passed, {'x': {}})['x']", "torch.stack([{}, {}])[1]", "{} if True else {}",
    "torch.zeros_like({}) + {}", "({}).view(({}).shape)", "({}) - 0 * ({})",
)  # fmt: skip
RIGHT = """import torch
from scaling import tree
from scaling.collectives import wait
from scaling.collectives import all_gather as gathered, reduce_scatter as scattered

def passed(x):
    return x

def paired(x, y=None):
    return x, y

"""


def outcomes(mesh, file: str, texts: list[str]) -> list[str]:
    """Of each text on this rank; they share the ranks, so one that leaves a collective behind ends them all."""
    wanted = program(mesh, file, text_of(file))
    found = []
    for text in texts:
        try:
            got = program(mesh, file, text)
        except Exception:
            found.append("raises")
            continue
        alike = got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-9, atol=1e-12)
        found.append("same" if alike else "wrong")
    return found


def given_by_ranks(file: str, texts: list[str]) -> list[str]:
    """The outcomes of edits of one file: of all together, or where one spoils the ranks of each alone."""
    try:
        ranks = launch.run(outcomes, mesh_of(file), file, texts, timeout=SECONDS)
        words = [set(each) for each in zip(*ranks, strict=True)]  # of each edit on all ranks
        return [next(word for word in ("raises", "wrong", "same") if word in each) for each in words]
    except Exception:
        if len(texts) == 1:
            return ["raises"]
        half = len(texts) // 2
        return given_by_ranks(file, texts[:half]) + given_by_ranks(file, texts[half:])


def stored(kept: Path = STORED) -> dict[str, str]:
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return dict(line.split() for line in lines)


def alike(call: ast.Call, rng: random.Random) -> str:
    """A typed call that gives the same, in another form if it has one of the form that is drawn."""
    (name, (line, *rest), options), whole, text = parts_of(call), ast.unparse(call), call.args[0].value
    parsed = parse_line(text) if "->" in text else None

    def again(line=line, rest=rest) -> str:
        return f"{name}({', '.join([line, *rest, *options])})"

    match rng.choice(FORMS):
        case "within another call" if "async_op=True" not in whole and "defer=True" not in whole:
            return rng.choice(SAME).replace("{}", whole)
        case "the line as other text":
            half = rng.randrange(1, len(text) - 1)
            one, other = repr(text[:half]), repr(text[half:])
            said = rng.choice((f"{one} + {other}", f"{one} {other}", f"''.join([{one}, {other}])", repr(f" {text}")))
            return again(said)
        case "operands exchanged" if name == "einsum" and len(rest) == 2 and not options:
            a, b = parsed.operands
            return again(repr(f"{b} * {a} -> {parsed.result}"), rest[::-1])
        case "another name" if parsed:  # which says nothing of a type
            return again(repr(f"{' * '.join(map(str, parsed.operands))} -> {parsed.result.with_name('R')}"))
        case "an operand within another call" if name == "einsum":
            at = rng.randrange(len(rest))
            around = rng.choice(("passed({})", "paired({})[0]"))
            return again(rest=[*rest[:at], around.format(rest[at]), *rest[at + 1 :]])
        case "in two steps" if name == "all_gather" and not options:
            return f"wait({whole[:-1]}, async_op=True))"
        case "in two steps" if name == "all_reduce" and not options:
            before, after = parsed.operands[0], parsed.result
            if free := [dim for dim, axes in before.dims if not axes and dim in ("D", "F", "B")]:
                part = after.with_axes(free[-1], [axis for axis in before.unreduced if axis not in after.unreduced])
                inner = f"scattered({f'{before} -> {part}'!r}, {', '.join(rest)})"
                return f"gathered({f'{part} -> {after}'!r}, {inner}, {rest[1]})"
    return whole


def variants(count: int, seed: int) -> Iterator[tuple[str, list[str], str]]:
    """(file, what was edited, its text): `count` of FILES, each with four to seven edits."""
    rng = random.Random(seed)
    for file in rng.sample(FILES, count):
        text, done = text_of(file), []
        for _ in range(rng.randrange(4, 8)):
            call = rng.choice(typed_calls(ast.parse(text)))
            done.append(alike(call, rng))
            text = text.replace(ast.get_source_segment(text, call), done[-1], 1)
        yield file, done, re.sub(r"(?m)^(?=import|from)", lambda _: RIGHT, text, count=1)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--fresh", type=int, metavar="N", help="N edits of each of five strategies, drawn")
    parser.add_argument("--seed", type=int, default=1, help="of --fresh")
    parser.add_argument("--right", type=int, metavar="N", help="right variants of N files")
    args = parser.parse_args()
    if args.right:
        for file, done, text in variants(args.right, 0):
            print(file, *given_by_ranks(file, [text]), *judgement(file, text).findings, *done, sep="\n  ")
    elif args.fresh:
        with tempfile.TemporaryDirectory() as folder:
            for listing in LISTINGS:
                every = drawn(listing, args.fresh, args.seed)
                known = run_all(every, Path(folder) / "outcomes.txt")
                print(f"{listing}: {len(every)} drawn, {dict(Counter(known[each.digest] for each in every))}")
                report(every, known)
    else:
        every = list(mutants())
        report(every, stored() if args.report else run_all(every, STORED))


def run_all(every: Iterable[Edit], kept: Path) -> dict[str, str]:
    """Run the edits that a file does not have the outcomes of, and add them to it; all that it has."""
    known, todo = stored(kept), defaultdict(dict)
    for each in every:
        if each.digest not in known:
            todo[each.file][each.digest] = each.text
    for file, texts in todo.items():
        keys = list(texts)
        for start in range(0, len(keys), TOGETHER):
            some = keys[start : start + TOGETHER]
            found = given_by_ranks(file, [texts[key] for key in some])
            with kept.open("a", encoding="utf-8") as out:
                out.writelines(f"{key} {word}\n" for key, word in zip(some, found, strict=True))
            print(file, start, Counter(found), flush=True)
    return stored(kept)


def report(every: Sequence[Edit], known: dict[str, str]) -> None:
    changing = [each for each in every if known.get(each.digest) == "wrong"]
    silent = [each for each in changing if not judgement(each.file, each.text).findings]
    count, missed = (Counter(each.kind for each in some) for some in (changing, silent))
    rows = [(kind, n - missed[kind], n) for kind, n in count.items()]
    told = [row for row in rows if row[0] != SAME_TYPE]
    name = "all but the same type" if SAME_TYPE in count else "all"
    for kind, refused, n in [*rows, (name, sum(row[1] for row in told), sum(row[2] for row in told))]:
        print(f"{kind:36} {refused:5} of {n:5} that change numbers silently  {refused / max(1, n):6.1%}")
    print(*(f"{each.kind}: {each.file}: {each.edit}" for each in silent), sep="\n")


if __name__ == "__main__":
    main()
