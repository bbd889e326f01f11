"""Where the members of a group write what they are about to do: a part of the page that they share.

Each meeting has a place, with a word, a state and a text of every member; `PLACES` meetings in turn have one each.
"""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

from scaling.mesh.futex import Word
from scaling.mesh.page import DIGEST, LENGTH, LINE, PLACES, ROW, WORD, SharedPage

# What a member does about its call: it decides whether to begin it early; has; first waits for all; has begun it and
# given up; sends zeros for what others began and gave up; has given up without having begun it.
DECIDES, BEGUN, STANDS, LEFT, FILLED, GONE = (
    name.ljust(DIGEST) for name in (b"decide", b"begun", b"stands", b"left", b"filled", b"gone")
)
EARLY = (DECIDES, BEGUN)
UNSET = bytes(2)  # in place of a meeting's number


class Place(NamedTuple):
    """Where in the page the place of a meeting is: all members' words, from `words` to `end`, and states; this one's
    word, state and text; and the first member's text.

    A word has eight bytes: a digest of six, and the meeting's number in two. A state has as many, and the number only
    when it is not `EARLY` any more.
    """

    words: int
    end: int
    states: int
    states_end: int
    word: int
    state: int
    text: int
    texts: int


class MeetingPlaces:
    """Those of group number `group` of the groups along set number `of_set` of axes, whose members are `ranks`."""

    def __init__(self, page: SharedPage, of_set: int, group: int, ranks: Sequence[int]):
        base = page.size * ROW + of_set * page.set_nbytes(page.size)
        self.memory, self.size, self.me = page.memory, len(ranks), ranks.index(page.rank)
        self.flag = Word(page.memory, base + group * LINE)
        self.fence = Lock()
        words = base + page.size * LINE
        states = words + PLACES * page.size * WORD
        texts = states + PLACES * page.size * WORD
        at = [turn * page.size + group * self.size for turn in range(PLACES)]  # this group's first member
        self.places = [self._place(words + i * WORD, states + i * WORD, texts + i * LENGTH) for i in at]

    def _place(self, words: int, states: int, texts: int) -> Place:
        mine, nbytes = self.me * WORD, self.size * WORD
        ends = words + nbytes, states, states + nbytes
        return Place(words, *ends, words + mine, states + mine, texts + self.me * LENGTH, texts)

    def at(self, number: int) -> Place:
        return self.places[number % PLACES]

    def words(self, number: int) -> bytes:
        """All members' words at a meeting, in a row."""
        place = self.places[number % PLACES]
        return self.memory[place.words : place.end]

    def states(self, number: int) -> bytes:
        place = self.places[number % PLACES]
        return self.memory[place.states : place.states_end]

    def said(self, number: int) -> list[bytes]:
        """All members' texts."""
        texts = self.at(number).texts
        return [self.memory[at : at + LENGTH] for at in range(texts, texts + self.size * LENGTH, LENGTH)]

    def post(self, number: int, digest: bytes, text: bytes, state: bytes) -> bytes:
        """Write this rank's word. Returns all words: who sees those of all members wakes the others."""
        memory, place, low = self.memory, self.places[number % PLACES], low_bytes(number)
        memory[place.text : place.text + len(text)] = text
        memory[place.state : place.state + WORD] = state + (UNSET if state in EARLY else low)
        memory[place.word : place.word + WORD] = digest + low
        self._order()
        words = memory[place.words : place.end]
        if all_here(words, low):
            self.wake()
        return words

    def _order(self) -> None:
        """What is read after this is not older than what was written before: of two ranks that write, then read, at
        least one sees what the other wrote."""
        with self.fence:
            pass

    def set_state(self, number: int, state: bytes) -> None:
        place = self.places[number % PLACES]
        self.memory[place.state : place.state + WORD] = state + (UNSET if state in EARLY else low_bytes(number))

    def take_back(self, number: int) -> bool:
        """Take this rank's word back, unless all others have come: one of them may have seen it, and gone on.

        Of several ranks that ask at one time each counts as here for the others until it has gone: if one that came
        has seen them all, they all stay.
        """
        place, low = self.at(number), low_bytes(number)
        word = self.memory[place.word : place.word + WORD]
        self.memory[place.word : place.word + WORD] = bytes(WORD)
        self._order()
        all_said = zip(each_word(self.words(number)), each_word(self.states(number)), strict=True)
        stays = all(said[DIGEST:] == low or state == STANDS + low for said, state in all_said)
        if stays:
            self.memory[place.word : place.word + WORD] = word
        else:
            self.set_state(number, GONE)
        self.wake()
        return not stays

    def wake(self) -> None:
        """Let those who wait look again."""
        self.flag.set(self.flag.value + 1 + self.me)


def low_bytes(number: int) -> bytes:
    """The last two bytes of a meeting's words; never those of memory that nobody has written to."""
    return (number % 0xFFFF + 1).to_bytes(2, "little")


def all_here(words: bytes, low: bytes) -> bool:
    """Whether all words, or states, in a row have a meeting's number."""
    size = len(words) // WORD
    return words[DIGEST::WORD].count(low[:1]) == size == words[DIGEST + 1 :: WORD].count(low[1:])


def only(words: bytes, word: bytes) -> bool:
    """Whether all words in a row that have this one's number are this one, which is among them."""
    return {each for each in each_word(words) if each[DIGEST:] == word[DIGEST:]} == {word}


def each_word(words: bytes) -> list[bytes]:
    return [words[i : i + WORD] for i in range(0, len(words), WORD)]
