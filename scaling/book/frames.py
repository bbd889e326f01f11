"""Collectives on a ring, frame by frame: the data of each device after every hop (Part 3's animations, as text).

    for frame in all_gather(4): ...      frame[d]: the shards that device d has
    print(draw(all_gather(4), str))      a column for each hop
    show_frames(page, all_gather(4), str)   on a chapter's page, in a notebook as a picture

In every hop each device sends its neighbours on the ring what `scaling.collectives.rings` really sends.
"""

from collections.abc import Callable, Sequence

from scaling.book.layout import table
from scaling.book.page import Page
from scaling.show import svg


def all_gather(n: int, ways: int = 2) -> list[list[set[int]]]:
    """Return frames with frame[d] the shards of device d, which passes on its last shard, one way or both ways."""
    held = [{d} for d in range(n)]
    frames, right, left = [held], list(range(n)), list(range(n))  # each device's last shard from either side
    for hop in range(n - 1 if ways == 1 else n // 2):
        right = [right[(d - 1) % n] for d in range(n)]
        left = [left[(d + 1) % n] for d in range(n)]
        both = ways == 2 and hop < (n - 1) // 2
        held = [held[d] | {right[d]} | ({left[d]} if both else set()) for d in range(n)]
        frames.append(held)
    return frames


def reduce_scatter(n: int) -> list[list[tuple[int, frozenset[int]]]]:
    """Return frames with frame[d] the block whose sum device d works on, and its terms so far; one way round the ring.

    A sum begins on the neighbour of the device that will own it, and passes all other devices before it arrives there.
    """
    sums = [((d - 1) % n, frozenset({d})) for d in range(n)]
    frames = [sums]
    for _ in range(n - 1):
        sums = [(block, terms | {d}) for d in range(n) for block, terms in [sums[(d - 1) % n]]]
        frames.append(sums)
    return frames


def all_to_all(n: int) -> list[list[tuple[tuple, tuple]]]:
    """Return frames with frame[d] the chunks (source, target) that device d keeps and will pass on; one way."""
    state: list = [(((d, d),), tuple((d, (d + hops) % n) for hops in range(1, n))) for d in range(n)]
    frames = [state]
    for _ in range(n - 1):
        arriving = [state[(d - 1) % n][1] for d in range(n)]
        state = [(state[d][0] + arriving[d][:1], arriving[d][1:]) for d in range(n)]
        frames.append(state)
    return frames


def draw(frames: Sequence[Sequence], cell: Callable[[object], str]) -> str:
    """Return a table with a row for each device and a column for each frame; `cell` writes the data of a device."""
    rows = [(f"device {d}", *(cell(frame[d]) for frame in frames)) for d in range(len(frames[0]))]
    return table(rows, ["", "at first", *(f"hop {hop}" for hop in range(1, len(frames)))])


def show_frames(page: Page, frames: Sequence[Sequence], cell: Callable[[object], str]) -> None:
    """Show frames on a chapter's page, as text, or in a notebook as a picture for each hop with a row for each device.

    A cell has the colour of the device whose letter begins it, up to the bar, which chunks that travel follow.
    """

    def cells(device: int, text: str) -> list[tuple[str, str]]:
        kept, _, passing = (part.split() if " " in part else [*part] for part in text.partition(" | "))
        n = len(frames[0])
        coloured = [(x.strip("."), svg.colour(ord(x[0].upper()) - 65, n, n) if x[0].isalpha() else "") for x in kept]
        return [(str(device), "#fff"), *coloured, *((x, "") for x in passing)]

    drawn = [[cells(device, cell(state)) for device, state in enumerate(frame)] for frame in frames]
    pictures = [(f"hop {hop}" if hop else "at first", rows) for hop, rows in enumerate(drawn)]
    page.show(draw(frames, cell), lambda: svg.grids(pictures, 180, 22 * len(frames[0])))


def draw_shards(held: set[int], n: int) -> str:
    """Return the shards as letters: {0, 2} of 4 -> "A.C."."""
    return "".join(chr(ord("A") + i) if i in held else "." for i in range(n))


def partial_sum(state: tuple[int, frozenset[int]]) -> str:
    """Return a partial sum as text: (2, {0, 3}) -> "C: 0+3"."""
    return f"{chr(ord('A') + state[0])}: " + "+".join(map(str, sorted(state[1])))


def draw_chunks(state: tuple[tuple, tuple]) -> str:
    """Return the kept chunks, a bar and the travelling ones, each as its source's letter and target's number."""
    kept, passing = (" ".join(f"{chr(ord('a') + i)}{j}" for i, j in part) for part in state)
    return f"{kept} | {passing}".rstrip(" |") if not passing else f"{kept} | {passing}"
