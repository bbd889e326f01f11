"""Read the numbers of a traced step as products of its sizes, which are chosen to be primes.

At such sizes the bytes of an array or the FLOPs of a product are numbers like 2 b T D, whose prime factors tell which
sizes they are a product of. `Symbols.monomial` reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from scaling.cost.lines import Monomial, Polynomial
from scaling.trace.peak import PeakMemory


class NotMonomial(ValueError):
    """A number that is not a product of the symbols' sizes and a small coefficient."""


@dataclass(frozen=True)
class Symbols:
    """Symbols with their sizes, by which a number is factored.

    Each symbol has a prime factor of its size that divides no later symbol's size, so its power can be read off.

    Attributes:
        sizes: (name, size, prime) of each symbol.
        sums: (name, size) of numbers that are sums, which are symbols, too.
        free: The primes that a coefficient may have.
    """

    sizes: tuple[tuple[str, int, int], ...]
    sums: tuple[tuple[str, int], ...] = ()
    free: tuple[int, ...] = ()
    known: dict[int, Polynomial] = field(default_factory=dict, compare=False, repr=False)

    @property
    def collide(self) -> list[str]:
        """The sums that are also products of the sizes."""
        return [name for name, size in self.sums if self._factored(size)]

    def monomial(self, n: int) -> Polynomial:
        """Return a number as a monomial with its coefficient.

        Raises:
            NotMonomial: The number has another prime factor, so that it is a sum, or two sizes collide.
        """
        if n not in self.known:
            if self.collide:
                raise NotMonomial(f"{self.collide} of {self.sums} are also products of the sizes {self.sizes}")
            found = self._factored(n) if n else (Fraction(0), ())
            for name, size in self.sums if found is None else ():
                if n % size == 0 and (rest := self._factored(n // size)):
                    found = rest[0], (*rest[1], (name, 1))
                    break
            if found is None:
                raise NotMonomial(f"{n} is not a product of the sizes {self.sizes}")
            self.known[n] = Polynomial({found[1]: found[0]})
        return self.known[n]

    def _factored(self, n: int) -> tuple[Fraction, Monomial] | None:
        rest, powers = Fraction(n), {}
        for name, size, prime in self.sizes:
            if power := valuation(rest, prime):
                powers[name] = power
                rest /= Fraction(size) ** power
        left = abs(rest.numerator * rest.denominator)
        for prime in self.free:
            while left % prime == 0:
                left //= prime
        return (rest, tuple(sorted(powers.items()))) if left == 1 else None


def valuation(n: Fraction, prime: int) -> int:
    """Return the power of a prime in a fraction."""
    power, over, under = 0, n.numerator, n.denominator
    while over % prime == 0:
        over, power = over // prime, power + 1
    while under % prime == 0:
        under, power = under // prime, power - 1
    return power


def prime_factors(numbers: Iterable[int]) -> set[int]:
    """Return the prime factors of the numbers."""
    return {d for n in {*numbers} for d in range(2, n + 1) if n % d == 0 and all(d % q for q in range(2, d))}


def primes_for(names: Sequence[str], taken: Iterable[int], least: Mapping[str, int]) -> dict[str, int]:
    """Return a prime for each name, at least as large as `least` says, that divides none of the numbers `taken`."""
    found: dict[str, int] = {}
    for name in names:
        n = least[name]
        while n in found.values() or any(n % d == 0 for d in range(2, n)) or any(m % n == 0 for m in taken):
            n += 1
        found[name] = n
    return found


@dataclass
class LiveSymbols(PeakMemory):
    """The bytes of live tensors as polynomials: a row for each operation, sorted by the line that it follows.

    Attributes:
        symbols: The symbols of the sizes.
        columns: The column of each monomial.
        alive: The coefficients of the bytes that are alive now, by column.
        rows: The rows by line; a row is as long as the number of columns was when it was added.
        error: Why a number could not be read. It is kept, because an error where a tensor is freed would be ignored.
    """

    symbols: Symbols = field(default_factory=lambda: Symbols(()))
    columns: dict[Monomial, int] = field(default_factory=dict)
    alive: list[float] = field(default_factory=list)
    rows: dict[str, list[list[float]]] = field(default_factory=dict)
    error: NotMonomial | None = None
    _known: dict[int, tuple[int, float]] = field(default_factory=dict)  # by bytes: column and coefficient
    _line: tuple[int, str] = (0, "")
    _grew: bool = True

    def add(self, nbytes: int) -> None:
        """Add bytes that are now alive; a negative number frees them."""
        super().add(nbytes)
        self._grew = self._grew or nbytes > 0
        if (size := abs(nbytes)) not in self._known:
            try:
                monomial, coefficient = self.symbols.monomial(size).single
            except NotMonomial as error:
                self.error = self.error or error
                return
            if (column := self.columns.setdefault(monomial, len(self.columns))) == len(self.alive):
                self.alive.append(0.0)
            self._known[size] = column, float(coefficient)
        column, coefficient = self._known[size]
        self.alive[column] += coefficient if nbytes > 0 else -coefficient

    def ended(self) -> None:
        """Add a row of the bytes that are alive after an operation, unless the last row covers it."""
        if self._line[0] != len(events := self.log.events):
            self._line, self._grew = (len(events), str(events[-1])), True
        if self._grew:
            self.rows.setdefault(self._line[1], []).append(self.alive.copy())
            self._grew = False
