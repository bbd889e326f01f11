"""Read the notation: split the text of a type or a line into its parts (notation.md has the grammar).

An error puts a caret under the character where reading failed.
"""

import re
from typing import NoReturn

Dims = tuple[tuple[str, tuple[str, ...]], ...]

NAME = r"[A-Za-z_][A-Za-z0-9_']*(\.[A-Za-z0-9_']+)*|[0-9]+(\.[A-Za-z0-9_']+)+"  # as named_parameters(): `0.fc1.weight`
NUMBER = r"[0-9]{1,18}(?![0-9])"
DIM = r"[A-Za-z][A-Za-z0-9']*(/[1-9][0-9]{0,8})?"  # `D/32` has one place for each 32 of D
AXIS = r"[A-Za-z][A-Za-z0-9]*"  # a word of capitals names one axis per letter, `XY`; any other is one name, `data`
QUOTED = 200  # characters of a text that an error message quotes


class ShardingError(ValueError):
    """A type or a line that breaks a rule of the notation; the message quotes it and names the rule and the fix."""


def refuse(line, what: str, rule: str, fix: str) -> NoReturn:
    """Raise a ShardingError that quotes the line and gives the mistake, the rule that it breaks, and the fix."""
    raise ShardingError(f"{line}\n  {what}\n  rule: {rule}\n  fix: {fix}")


ReadType = tuple[str, Dims, tuple[str, ...], tuple[str, ...]]  # the parts of a type, as `scaling.spec.Spec` holds them
ReadLine = tuple[tuple[ReadType, ...], ReadType, tuple[str, ...]]  # operands, result, the dims of written `*_J`


def read_type(text: str, repeats: bool = False) -> ReadType:
    """Split the text of a type, `W[D_X, F] {U_Y}`, into its parts.

    Args:
        text: The type.
        repeats: Allow dims that are numbers to occur more than once, as in `[8_X, 8]`.

    Raises:
        ShardingError: The syntax is wrong, or a dim or a mesh axis is used twice.
    """
    reader = _Reader(text, repeats)
    found = reader.type()
    reader.end()
    return found


def read_line(text: str) -> ReadLine:
    """Split the text of a line, `A[I, J] * B[J, K] -> C[I, K]`, into its parts.

    Raises:
        ShardingError: The syntax is wrong, or a type uses a dim or a mesh axis twice.
    """
    reader = _Reader(text)
    operands, contract = [reader.type()], []
    while (dim := reader.product()) is not None:
        contract += [dim] if dim else []
        operands.append(reader.type())
    reader.take(r"->|→", "'->' and the type of the result (or '*' and another operand)")
    result = reader.type()
    reader.end()
    return tuple(operands), result, tuple(contract)


def split_axes(word: str) -> tuple[str, ...]:
    """Return the mesh axes that a word names: "XY" names X and Y, "data" names one axis."""
    return tuple(word) if re.fullmatch("[A-Z]+", word) else (word,)


class _Reader:
    """A cursor over the text; each method reads one piece of the grammar and moves the cursor past it."""

    def __init__(self, text: str, repeats: bool = False):
        self.text, self.position, self.repeats = text, 0, repeats

    def fail(self, message: str, position: int | None = None, fix: str = "") -> NoReturn:
        position = self.position if position is None else position
        start = max(0, position - QUOTED // 2) if len(self.text) > QUOTED else 0
        text = re.sub(r"\s", " ", self.text[start : start + QUOTED])
        raise ShardingError(f"{message}\n  {text}\n  {' ' * (position - start)}^" + (f"\n  fix: {fix}" if fix else ""))

    def skip(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def find(self, pattern: str) -> str | None:
        self.skip()
        if match := re.compile(pattern, re.ASCII).match(self.text, self.position):
            self.position = match.end()
            return match[0]
        return None

    def take(self, pattern: str, expected: str) -> str:
        if (found := self.find(pattern)) is None:
            self.fail(f"expected {expected}")
        return found

    def end(self) -> None:
        self.skip()
        if self.position < len(self.text):
            self.fail("expected the end of the type")

    def type(self) -> ReadType:
        name = self.find(NAME) or ""
        self.take(r"\[", "a type such as W[D, F_X]: '['")
        dims, seen, unreduced = [], {}, ()
        while not self.find(r"\]"):
            if dims:
                self.take(",", "',' or ']'")
            self.skip()
            position, dim = self.position, self.take(f"{DIM}|{NUMBER}", "a dim, such as D or F_X")
            if not (self.repeats and dim.isdigit()):
                self.once(seen, dim, position, f"dim {dim}", "give the dims two names")
            dims.append((dim, self.axes(seen) if self.find("_") else ()))
        if self.find(r"\{\s*U\s*[_.]"):
            unreduced = tuple(sorted(self.axes(seen)))
            self.take(r"\}", "'}' after the unreduced axes")
        return name, tuple(dims), unreduced, self.shared([dim for dim, _ in dims], unreduced)

    def shared(self, dims: list[str], unreduced: tuple[str, ...]) -> tuple[str, ...]:
        """Read `{Q_D}`, `{Q_D,F}` or `{Q}`: the dims along which values share a scale, which are all dims for `{Q}`."""
        self.skip()
        start, found = self.position, []
        if not self.find(r"\{\s*Q(?=[_\s}])"):
            return ()
        while self.find("," if found else "_"):
            self.skip()
            position, dim = self.position, self.take(DIM, "a dim of the array, as in {Q_D}")
            if dim not in dims or dim in found:
                what = f"dim {dim} is {'named twice' if dim in found else 'not a dim of the array'}"
                self.fail(what, position, f"name some of {', '.join(dims)}, each once")
            found.append(dim)
        self.take(r"\}", "'}' after the dims that share a scale")
        if unreduced or not dims:
            rule = "a sum is not quantized: terms with scales of their own cannot be added" if unreduced else "no dims"
            self.fail(f"rule: {rule}", start, "reduce it, then quantize" if unreduced else "keep a number as it is")
        return tuple(dim for dim in dims if dim in (found or dims))

    def axes(self, seen: dict) -> tuple[str, ...]:
        """Read mesh axes written as `XY`, `{XY}`, `data` or `{data,model}`."""
        braced, axes = self.find(r"\{"), []
        while True:
            self.skip()
            position, word = self.position, self.take(AXIS, "a mesh axis, such as X or {data,model}")
            for offset, axis in enumerate(split_axes(word)):
                fix = "split one dim over it, or leave it out of {U_...}"
                self.once(seen, ("axis", axis), position + offset, f"mesh axis {axis}", fix)
                axes.append(axis)
            if not (braced and self.find(",")):
                break
        if braced:
            self.take(r"\}", "'}' or ',' and another axis")
        return tuple(axes)

    def once(self, seen: dict, key, position: int, what: str, fix: str) -> None:
        if key in seen:
            self.fail(f"{what} is used twice: each occurs at most once in a type", position, fix)
        seen[key] = position

    def product(self) -> str | None:
        """Read `*`, `·`, `*_J` or `*_LOCAL`; return the dim named ("" for none), or None if no product follows."""
        if not self.find(r"[*·]"):
            return None
        if not self.find("_"):
            return ""
        dim = self.take(rf"{DIM}(?=\s|$)", "the dim contracted, as in *_D, and a space")
        return "" if dim == "LOCAL" else dim
