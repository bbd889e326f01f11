"""A step as symbols: polynomials of the sizes, which answer for every size of the model, the batch and the mesh.

A step that runs on an abstract mesh at sizes that are primes (`scaling.trace.symbols`) shows in each of its numbers
which sizes it is a product of. So one run of a step's own code gives a `StepProgram`: its FLOPs, the bytes of its lines
and the bytes that are alive after each of its operations, all as polynomials. `StepProgram.at` evaluates them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np

from scaling.algebra.steps import sent_share
from scaling.cost.counted import WORK, Calls, CountedStep

Monomial = tuple[tuple[str, int], ...]  # the exponent of each symbol


@dataclass(frozen=True)
class Polynomial:
    """A sum of monomials, each with its coefficient."""

    terms: Mapping[Monomial, Fraction]

    def __mul__(self, times: int) -> "Polynomial":
        return Polynomial({monomial: times * n for monomial, n in self.terms.items()})

    def __add__(self, other: "Polynomial | float") -> "Polynomial":
        if not isinstance(other, Polynomial):
            assert not other, "only 0 and polynomials are added"
            return self
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            terms[monomial] = terms.get(monomial, Fraction(0)) + coefficient
        return Polynomial(terms)

    __radd__ = __add__

    @property
    def single(self) -> tuple[Monomial, Fraction]:
        """The only monomial and its coefficient."""
        ((monomial, coefficient),) = self.terms.items()
        return monomial, coefficient


@dataclass(frozen=True)
class Shares:
    """The bytes that a rank sends in collectives of one kind: `terms` has {V: how often it occurs}.

    The rank sends a share of each V, rounded to whole bytes.
    """

    terms: Mapping[tuple[Monomial, Fraction], float]

    def __add__(self, other: "Shares | float") -> "Shares":
        if not isinstance(other, Shares):
            assert not other, "only 0 and shares are added"
            return self
        return Shares({V: self.terms.get(V, 0) + other.terms.get(V, 0) for V in [*self.terms, *other.terms]})

    __radd__ = __add__


class Monomials:
    """The values of monomials, given the sizes of the symbols as numbers or columns; each is computed once."""

    def __init__(self, sizes: Mapping[str, Any]):
        self.sizes = {name: Fraction(n) if np.ndim(n) == 0 else np.asarray(n, float) for name, n in sizes.items()}
        self.known: dict[Monomial, Any] = {}

    def of(self, monomial: Monomial) -> Any:
        """Return the value of a monomial: exact for numbers, floats for columns."""
        if monomial not in self.known:
            self.known[monomial] = prod((self.sizes[name] ** power for name, power in monomial), start=Fraction(1))
        return self.known[monomial]

    def value(self, polynomial: "Polynomial | float") -> Any:
        """Return the value of a polynomial: floats for columns; for numbers an int if it is whole, else a float."""
        if not isinstance(polynomial, Polynomial):
            return polynomial
        columns = any(isinstance(self.of(monomial), np.ndarray) for monomial in polynomial.terms)
        kind = float if columns else Fraction
        found: Any = sum(kind(n) * self.of(monomial) for monomial, n in polynomial.terms.items())
        return found if columns else int(found) if Fraction(found).denominator == 1 else float(found)


@dataclass(frozen=True)
class LiveBytes:
    """The bytes that are alive after one line: a row for each operation that follows it, a column for each monomial.

    A row that another one exceeds or equals in each column is left out, since it never has the most bytes.
    """

    monomials: tuple[Monomial, ...]
    rows: np.ndarray

    @staticmethod
    def of(monomials: Sequence[Monomial], rows: Sequence[Sequence[float]]) -> "LiveBytes":
        """Return the rows as a matrix, padded with zeros, without each row that another one covers in every column."""
        matrix = np.zeros((len(rows), len(monomials)))
        for i, row in enumerate(rows):
            matrix[i, : len(row)] = row
        matrix = np.unique(matrix, axis=0)
        kept = np.empty((0, len(monomials)))
        for row in matrix[np.argsort(-matrix.sum(1), kind="stable")]:
            if not (kept >= row).all(1).any():
                kept = np.vstack([kept, row])
        used = [i for i in range(len(monomials)) if kept[:, i].any()]
        return LiveBytes(tuple(monomials[i] for i in used), kept[:, used])

    def most(self, sizes: Monomials) -> Any:
        """Return the most bytes of any row."""
        values = [sizes.of(monomial) for monomial in self.monomials]
        found = self.rows @ np.array(np.broadcast_arrays(*(np.asarray(value, float) for value in values)))
        return found.max(0) if found.ndim > 1 else round(found.max())


@dataclass(frozen=True)
class StepProgram:
    """A step of one structure: its work and its lines as polynomials, and the bytes that are alive after each line."""

    step: CountedStep
    live: Mapping[str, LiveBytes]

    def at(
        self, sizes: Mapping[str, Any], groups: Mapping[str, Any], held: Mapping[str, Any], as_is: Sequence[str],
        staged: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        """Return the CountedStep at these sizes.

        Args:
            sizes: The value of each symbol, a number or a column.
            groups: The sizes of the mesh's axes.
            held: The values of symbols that have another value when live bytes are counted.
            as_is: The operations for which the bytes sent, not V, are in the terms.
            staged: The values of symbols that have another value in collectives over stages.
        """
        at, over_stages = Monomials(sizes), Monomials({**sizes, **staged})
        lines = {}
        for kind, calls in self.step.lines.items():
            whole = over_stages if "Z" in kind.axes else at
            over, under = share_of_sent(kind.op, prod(groups.get(axis, 1) for axis in kind.axes))
            terms: Mapping = calls.sent.terms  # type: ignore[union-attr]
            if kind.op in as_is:
                sent = sum(n * coefficient * at.of(monomial) for (monomial, coefficient), n in terms.items())
            else:
                each = [(n, coefficient * whole.of(monomial)) for (monomial, coefficient), n in terms.items()]
                sent = sum(n * (V * over // under) for n, V in each)
            lines[kind] = Calls(calls.number, whole.value(calls.amount), sent)
        work: dict[str, Any] = {name: _at(getattr(self.step, name), at) for name in WORK}
        params, state = at.value(self.step.params), at.value(self.step.state)
        alive = Monomials({**sizes, **held}) if held else at
        peaks = {line: live.most(alive) - params - state for line, live in self.live.items()}
        return replace(self.step, **work, lines=lines, params=params, state=state, peaks=peaks)


def _at(calls: Calls, sizes: Monomials) -> Calls:
    return Calls(calls.number, sizes.value(calls.amount))


def share_of_sent(op: str, n: Any) -> tuple[Any, Any]:
    """Return the share of V that each of n ranks sends, as (numerator, denominator)."""
    if op in ("AllGather", "Gather"):
        return n - 1, n
    if op == "AllToAll":
        return n - 1, n * n
    return (1, 1) if op == "Send" else sent_share(op, n)
