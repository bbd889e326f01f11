"""The gated delta rule, a linear attention whose state has one size at any length: in chunks, with its derivative.

Yang et al. 2024, "Gated Delta Networks" (arxiv.org/abs/2412.06464, section 3.3). Each head has a state S[h, v], a map
from keys to values. A token lets it decay by exp(g), reads the value that its key k maps to, and writes the share
`beta` of the difference from its own value:

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    O = S^T q

Token by token this is a product with a vector each. In chunks of c tokens it is products of matrices (Yang et al. 2024,
arxiv.org/abs/2406.06484): the values that a chunk's tokens write depend on each other by a triangular matrix, so they
are its inverse times the values that the tokens would write alone. `decays` has the products of exp(g) between two
tokens.

    A[c, c] = beta (K K^T) pair, below the diagonal      a token's key reads the values of earlier tokens
    New[c, v] = (1 + A)^-1 beta (V - (into K) S)         the values that the chunk writes
    O = (into Q) S + (Q K^T pair) New
    S <- through S + (out K)^T New
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens of a chunk


class Decays(NamedTuple):
    """The share of a state that is left between two places of a chunk; 0 across the start of a document.

    Attributes:
        pair: pair[.., c, c], whose entry (i, j) is the share from after token j to token i >= j; 0 above the diagonal.
        into: into[.., c, 1], from the chunk's start to token i.
        out: out[.., c, 1], from token j to the chunk's end.
        through: through[.., 1, 1], from the chunk's start to its end.
    """

    pair: Tensor
    into: Tensor
    out: Tensor
    through: Tensor


class Kept(NamedTuple):
    """The arrays of a forward pass that its derivative needs: the state before each chunk, and the chunk's values.

    Attributes:
        states: states[B, n, chunks, h, v].
        new: new[B, n, chunks, c, v].
    """

    states: Tensor
    new: Tensor


def decays(g: Tensor, starts: Tensor | None = None) -> Decays:
    """Return the decays by g[.., c], the logs of the tokens' decays; starts[.., c] marks documents' first tokens."""
    G, c = g.cumsum(-1), g.shape[-1]
    here = torch.ones(c, c, dtype=torch.bool, device=g.device).tril()
    first = last = torch.ones((), dtype=torch.bool, device=g.device)
    if starts is not None:
        run = starts.cumsum(-1)
        here, first, last = here & (run[..., :, None] == run[..., None, :]), run == 0, run == run[..., -1:]
    pair = (G[..., :, None] - G[..., None, :]).masked_fill(~here, -torch.inf).exp()
    into, out = G.exp() * first, (G[..., -1:] - G).exp() * last
    return Decays(pair, into[..., None], out[..., None], into[..., -1:, None])


def chunked(x: Tensor, chunk: int) -> Tensor:
    """x[B, T, n, ...] -> [B, n, chunks, c, ...], padded with zeros, by which a token neither reads nor writes."""
    short = -x.shape[1] % chunk
    x = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, short)) if short else x
    return x.unflatten(1, (-1, chunk)).movedim(3, 1)


def joined(x: Tensor, T: int) -> Tensor:
    """Invert `chunked`: return the first T tokens of x[B, n, chunks, c, ...] as [B, T, n, ...]."""
    return x.movedim(1, 3).flatten(1, 2)[:, :T]


def _solve(A: Tensor, x: Tensor, back: bool = False) -> Tensor:
    """Return (1 + A)^-1 x for A[.., c, c] that is 0 on and above the diagonal; with `back`, (1 + A^T)^-1 x."""
    return torch.linalg.solve_triangular(A.mT if back else A, x, upper=back, unitriangular=True)


def delta_rule(
    Q: Tensor, K: Tensor, V: Tensor, g: Tensor, beta: Tensor, S: Tensor, starts: Tensor | None = None, chunk=CHUNK
) -> tuple[Tensor, Tensor, Kept]:
    """Q, K[B, T, n, h], V[B, T, n, v], g, beta[B, T, n], S[B, n, h, v] -> (O[B, T, n, v], S[B, n, h, v], kept).

    S is the state before the first token, and the second result the one after the last. starts[B, T] marks the first
    tokens of packed documents, at which the state is 0. With T = 1 this is a step of decoding.
    """
    T, chunk = Q.shape[1], min(chunk, Q.shape[1])
    q, k, v, g, b, d, A, M = _products(Q, K, V, g, beta, starts, chunk)
    U, W = _solve(A, b * v), _solve(A, b * d.into * k)  # New = U - W S
    read, write, states, new, out = d.into * q, (d.out * k).mT, [], [], []
    for i in range(U.shape[2]):
        states.append(S)
        new.append(U[:, :, i] - W[:, :, i] @ S)
        out.append(read[:, :, i] @ S + M[:, :, i] @ new[-1])
        S = d.through[:, :, i] * S + write[:, :, i] @ new[-1]
    return joined(torch.stack(out, 2), T), S, Kept(torch.stack(states, 2), torch.stack(new, 2))


def _products(Q, K, V, g, beta, starts, chunk: int) -> tuple:
    """Return the arguments in chunks, beta as a column, their `Decays`, A and M = Q K^T pair."""
    q, k, v, g, b = (chunked(x, chunk) for x in (Q, K, V, g, beta[..., None]))
    d = decays(g, None if starts is None else chunked(starts[..., None], chunk))
    return q, k, v, g, b, d, (b * (k @ k.mT) * d.pair).tril(-1), (q @ k.mT) * d.pair


def delta_rule_backward(
    dO: Tensor, dS: Tensor, kept: Kept, Q, K, V, g, beta, starts: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor, ...]:
    """dO[B, T, n, v], dS[B, n, h, v], of the last state -> (dQ, dK, dV, dg, dbeta, dS of the first state)."""
    T, chunk, (states, new) = Q.shape[1], min(chunk, Q.shape[1]), kept
    q, k, v, g, b, d, A, M = _products(Q, K, V, g, beta, starts, chunk)
    dO = chunked(dO, chunk)
    W, read, write = _solve(A, b * d.into * k), d.into * q, d.out * k
    from_O, dNew, dEnd = read.mT @ dO, [*(M.mT @ dO).unbind(2)], [dS] * len(states[0, 0])
    for i in reversed(range(len(dEnd))):
        dEnd[i] = dS
        dNew[i] = dNew[i] + write[:, :, i] @ dS
        dS = d.through[:, :, i] * dS + from_O[:, :, i] - W[:, :, i].mT @ dNew[i]
    dEnd = torch.stack(dEnd, 2)
    dAlone = _solve(A, torch.stack(dNew, 2), back=True)  # the cotangent of beta (V - (into K) S)
    dA, dM = -(dAlone @ new.mT).tril(-1), (dO @ new.mT) * (d.pair != 0)
    dRead, dSeen, dWrite = dO @ states.mT, -b * (dAlone @ states.mT), new @ dEnd.mT  # for into Q, into K, out K
    dQK, dKK = dM * d.pair, dA * d.pair * b
    dQ = dQK @ k + d.into * dRead
    dK = dQK.mT @ q + dKK @ k + dKK.mT @ k + d.into * dSeen + d.out * dWrite
    dbeta = (dA * d.pair * (k @ k.mT)).sum(-1) + (dAlone * (v - d.into * (k @ states))).sum(-1)
    both, ended = dM * M + dA * A, (dWrite * write).sum(-1)
    dG = both.sum(-1) - both.sum(-2) + (dRead * read + dSeen * d.into * k).sum(-1) - ended
    last = ended.sum(-1) + (d.through * dEnd * states).sum((-1, -2))
    dg = dG.flip(-1).cumsum(-1).flip(-1) + last[..., None]  # g enters the decays of all later tokens of its chunk
    return *(joined(x, T) for x in (dQ, dK, b * dAlone, dg, dbeta)), dS
