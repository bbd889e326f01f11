"""Each faulty edit of tests/check/mutants.py run once on ranks beside the right program, and what came of it.

    python tests/check/outcomes.py              runs those that are not in outcomes.txt yet, and adds them
    python tests/check/outcomes.py --report     what the judge finds of those that change numbers, by kind
    python tests/check/outcomes.py --fresh 200 --seed 1     the same of 200 others a strategy, drawn and run here
    python tests/check/outcomes.py --right 100  judges 100 right variants, and runs them on ranks: each must be "same"

An edit's outcome is "same" (no number changes), "wrong" (numbers change and nothing is said) or "raises". The file
holds a line an edit: its digest and outcome.
"""

import tempfile
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import torch
from mutant_programs import judgement, mesh_of, program
from mutants import LISTINGS, ROOT, SAME_TYPE, drawn, mutants
from right_variants import variants

from scaling import launch
from scaling.common.console import Parser

STORED = Path(__file__).parent / "outcomes.txt"
TOGETHER, SECONDS = 24, 20  # edits that share their ranks; how long these wait for one another


def digest(file: str, before: str, edit: str) -> str:
    return blake2b(f"{file}\n{before}\n{edit}".encode(), digest_size=6).hexdigest()


def outcomes(mesh, file: str, texts: list[str]) -> list[str]:
    """Of each text on this rank; they share the ranks, so one that leaves a collective behind ends them all."""
    wanted = program(mesh, file, right(file))
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


def right(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def on_ranks(file: str, texts: list[str]) -> list[str]:
    """The outcomes of edits of one file: of all together, or where one spoils the ranks of each alone."""
    try:
        ranks = launch.run(outcomes, mesh_of(file), file, texts, timeout=SECONDS)
        words = [set(each) for each in zip(*ranks, strict=True)]  # of each edit on all ranks
        return [next(word for word in ("raises", "wrong", "same") if word in each) for each in words]
    except Exception:
        if len(texts) == 1:
            return ["raises"]
        half = len(texts) // 2
        return on_ranks(file, texts[:half]) + on_ranks(file, texts[half:])


def stored(kept: Path = STORED) -> dict[str, str]:
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    return dict(line.split() for line in lines)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--fresh", type=int, metavar="N", help="N edits of each of five strategies, drawn")
    parser.add_argument("--only", nargs="+", default=[*LISTINGS], help="of --fresh, these strategies")
    parser.add_argument("--seed", type=int, default=1, help="of --fresh")
    parser.add_argument("--right", type=int, metavar="N", help="N right variants")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of --fresh, where outcomes are kept")
    args = parser.parse_args()
    if args.right:
        run_right(args.right)
        return
    if args.fresh:
        for listing in args.only:
            fresh(listing, args.fresh, args.seed, args.out)
        return
    every = [(kind, file, before, edit, text) for kind, file, _, before, edit, text in mutants()]
    if not args.report:
        run_all(every, STORED)
    report(every, stored(STORED))


def fresh(listing: str, count: int, seed: int, kept: "Path | None") -> None:
    every = [
        (kind, file, f"{at}: {was}", edit, text) for kind, file, at, was, edit, text in drawn(listing, count, seed)
    ]
    with tempfile.TemporaryDirectory() as folder:
        kept = kept or Path(folder) / "outcomes.txt"
        run_all(every, kept)
        known = stored(kept)
    print(f"{listing}: {len(every)} drawn, {dict(Counter(known[digest(*each[1:4])] for each in every))}")
    report(every, known)


def run_right(count: int) -> None:
    for file, done, text in variants(count, 0):
        print(file, *on_ranks(file, [text]), *judgement(file, text).findings, *done, sep="\n  ")


def run_all(every, kept: Path) -> None:
    """Run the edits that a file does not have the outcomes of, and add them to it."""
    known, todo = stored(kept), {}
    for kind, file, before, edit, text in every:
        if digest(file, before, edit) not in known:
            todo.setdefault(file, {})[digest(file, before, edit)] = (kind, text)
    for file, edits in todo.items():
        keys = list(edits)
        for start in range(0, len(keys), TOGETHER):
            some = keys[start : start + TOGETHER]
            found = on_ranks(file, [edits[key][1] for key in some])
            with kept.open("a", encoding="utf-8") as out:
                out.writelines(f"{key} {word}\n" for key, word in zip(some, found, strict=True))
            print(file, start, Counter(found), flush=True)


def report(every, known: dict[str, str]) -> None:
    count, caught, silent = Counter(), Counter(), []
    for kind, file, before, edit, text in every:
        if known.get(digest(file, before, edit)) != "wrong":
            continue
        count[kind] += 1
        if judgement(file, text).findings:
            caught[kind] += 1
        else:
            silent.append(f"{kind}: {file}: {edit}")
    told = caught.total() - caught[SAME_TYPE], count.total() - count[SAME_TYPE]
    name = "all but the same type" if SAME_TYPE in count else "all"
    rows = [*((kind, caught[kind], n) for kind, n in count.items()), (name, *told)]
    for kind, refused, n in rows:
        print(f"{kind:36} {refused:5} of {n:5} that change numbers silently  {refused / max(1, n):6.1%}")
    print(*silent, sep="\n")


if __name__ == "__main__":
    main()
