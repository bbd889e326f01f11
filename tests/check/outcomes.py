"""Each faulty edit of tests/check/mutants.py run once on ranks beside the right program, and what came of it.

    python tests/check/outcomes.py              runs those that are not in outcomes.txt yet, and adds them
    python tests/check/outcomes.py --report     what the judge finds of those that change numbers, by kind
    python tests/check/outcomes.py --right 100  judges 100 right variants, and runs them on ranks: each must be "same"

An edit's outcome is "same" (no number changes), "wrong" (numbers change and nothing is said) or "raises". The file
holds a line an edit: its digest and outcome.
"""

from collections import Counter
from hashlib import blake2b
from pathlib import Path

import torch
from mutant_programs import judgement, mesh_of, program
from mutants import ROOT, mutants
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


def stored() -> dict[str, str]:
    lines = STORED.read_text(encoding="utf-8").splitlines() if STORED.exists() else []
    return dict(line.split() for line in lines)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--right", type=int, metavar="N", help="N right variants")
    args = parser.parse_args()
    if args.right:
        for file, done, text in variants(args.right, 0):
            print(file, *on_ranks(file, [text]), *judgement(file, text).findings, *done, sep="\n  ")
        return
    every = [(kind, file, before, edit, text) for kind, file, _, before, edit, text in mutants()]
    if not args.report:
        run_all(every)
    report(every)


def run_all(every) -> None:
    """Run the edits whose outcomes are not stored, and store them."""
    known, todo = stored(), {}
    for kind, file, before, edit, text in every:
        if digest(file, before, edit) not in known:
            todo.setdefault(file, {})[digest(file, before, edit)] = (kind, text)
    for file, edits in todo.items():
        keys = list(edits)
        for start in range(0, len(keys), TOGETHER):
            some = keys[start : start + TOGETHER]
            found = on_ranks(file, [edits[key][1] for key in some])
            with STORED.open("a", encoding="utf-8") as out:
                out.writelines(f"{key} {word}\n" for key, word in zip(some, found, strict=True))
            print(file, start, Counter(found), flush=True)


def report(every) -> None:
    known, count, caught, silent = stored(), Counter(), Counter(), []
    for kind, file, before, edit, text in every:
        if known.get(digest(file, before, edit)) != "wrong":
            continue
        count[kind] += 1
        if judgement(file, text).findings:
            caught[kind] += 1
        else:
            silent.append(f"{kind}: {file}: {edit}")
    rows = [*((kind, caught[kind], n) for kind, n in count.items()), ("all", caught.total(), count.total())]
    for kind, refused, n in rows:
        print(f"{kind:36} {refused:5} of {n:5} that change numbers silently  {refused / max(1, n):6.1%}")
    print(*silent, sep="\n")


if __name__ == "__main__":
    main()
