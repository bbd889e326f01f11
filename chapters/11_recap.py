# %% [markdown]
"""Part 11, the recap: every number of the book that the chapters compare with their own.
"Conclusions and Further Reading": https://jax-ml.github.io/scaling-book/conclusion

Each chapter that has numbers runs, and its answers are listed: the book's, ours, and the verdict. The end lists what
the chapters show, and how many verdicts of each kind a part has. `--parts 1,2` runs some parts; `--small` runs 1 and 2.
"""

# %%
from pathlib import Path

from scaling.book.answers import VERDICTS
from scaling.book.notebook import has_numbers, minutes, part, run_script, shows
from scaling.book.page import Page

page = Page(__doc__, parts=("", "the parts to run, 1,2,12; all if none is given"))
chosen = {int(n) for n in page.args.parts.split(",") if n.isdecimal()} or ({1, 2} if page.small else set())
folder = Path(__file__).parent if "__file__" in globals() else Path("chapters")
every = [path for path in sorted(folder.glob("[0-9]*.py")) if part(path) != 11]
paths = [path for path in every if not chosen or part(path) in chosen]
if strange := [n for n in page.args.parts.split(",") if n and n not in {str(part(path)) for path in every}]:
    page.refuse(f"--parts {page.args.parts}: no chapter of a part {strange[0]}; fix: 1 to 10, or 12")
parts = sorted({part(path) for path in paths})

# %% [markdown]
# ## The numbers, part by part
# "agrees" means that ours rounds to the book's number. "rounding" means that the book rounded on the way. "erratum"
# means that the book is wrong, and the line below the row says how. "ours" means that the book has no such number,
# because it asks without an answer, or because the chapter goes on from there.

# %%
sums = {}
for number in parts:
    page.title(f"Part {number}")
    before = len(page.given)
    for path in (path for path in paths if part(path) == number and has_numbers(path)):
        chapter = run_script(path)
        page.say(f"\n{path.name}: {shows(path)}")
        page.answers(chapter.page.given)
        for what, held in chapter.page.checks:
            page.check(f"{path.name}: {what}", held)
        page.check(f"{path.name} ends well", chapter.status == 0)
    if verdicts := [answer.verdict for answer in page.given[before:]]:
        sums[number] = [verdicts.count(verdict) for verdict in VERDICTS]

# %% [markdown]
# ## The chapters, one by one
# The table has the first sentence of each chapter, and the minutes to read and run it.

# %%
page.title("What each chapter shows")
page.table([(path.name, minutes(path), shows(path)) for path in every], ["chapter", "minutes", "shows"])

# %% [markdown]
# ## The numbers of all parts
# The table counts the numbers of each part, and their verdicts.

# %%
page.title("Numbers by part")
rows = [(f"Part {number}", sum(counts), *counts) for number, counts in sums.items()]
total = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
page.table([*rows, ("all", *total)], ["part", "numbers", *VERDICTS])
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `({1, 2} if` by `({12} if`: with `--small` Part 12 alone runs. How many of its numbers are errata?
#    Answer: 12 of 136, and 102 agree.
# 2. Question: which part has the most errata? Evaluate `max(sums, key=lambda n: sums[n][VERDICTS.index("erratum")])`.
#    Answer: With `--small`, which runs Parts 1 and 2, it is Part 2, with two.
# 3. Flag: run with `--parts 4`. How many numbers does Part 4 have?
#    Answer: 39: 24 agree, 3 are roundings, 3 errata, and 9 are ours alone.
