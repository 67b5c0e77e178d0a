"""Who gives to whom in a step of gossip: graphs over the sorted membership. Pure.

A step is a matrix P over the peers: p[i, j] is the share of its mass that j gives to i (i = j: what it keeps). Columns
sum to 1, so no mass is lost. Started from equal weights, repeated steps bring everybody to the mean, at a rate that the
spectral gap tells: the deviation from the mean shrinks by the factor

    rho = || P - 1 1^T / n ||_2          (largest singular value off the mean; P doubly stochastic)

a step, at least. For graphs that vary in time it is the product of the steps that counts, and for random ones the
expectation: E ||deviation||^2 shrinks by the second eigenvalue of E[P^T P].

    ring            half of the mass is kept, a quarter goes to either neighbour; one of two: a half
    exponential     half goes to peer i + 2^(t mod L), L = ceil(log2 n): one partner a step; exact after L steps where
                    n = 2^L (Assran et al. 2019, arXiv 1811.10792; Ying et al. 2021, arXiv 2110.13363)
    random-pairs    a matching drawn from (seed, t): both of a pair give half; with an odd number one rests

Every peer computes the same from the same membership, seed and step; where these differ between peers, steps are those
of another graph, and the weights of push-sum (gossip.py) keep the mean right all the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from dlc.errors import UsageError

Graph = Literal["ring", "exponential", "random-pairs"]
GRAPHS: tuple[str, ...] = get_args(Graph)
T = TypeVar("T")
Matrix = NDArray[np.float64]


def gives(graph: str, n: int, me: int, t: int, seed: int = 0) -> list[tuple[int, float]]:
    """(peer, share) of each gift of peer `me` of n in step t >= 0; shares are powers of 1/2, and sum to less than 1.

    UsageError for a graph that does not exist.
    """
    if graph not in GRAPHS:
        raise UsageError(f"there is no graph {graph!r}; known: {', '.join(GRAPHS)}")
    if n < 2:
        return []
    if graph == "ring":
        neighbours = sorted({(me - 1) % n, (me + 1) % n})
        return [(i, 0.5 / len(neighbours)) for i in neighbours]
    if graph == "exponential":
        return [((me + (1 << t % hops(n))) % n, 0.5)]
    partner = pairs(n, t, seed)[me]
    return [] if partner == me else [(partner, 0.5)]


def hops(n: int) -> int:
    """Steps after which the exponential graph begins anew: ceil(log2 n), at least 1."""
    return max(1, (n - 1).bit_length())


def pairs(n: int, t: int, seed: int = 0) -> list[int]:
    """Partner of each of n peers in step t; the one left over is its own."""
    order = list(range(n))
    random.Random(f"{seed} {t}").shuffle(order)
    partner = list(range(n))
    for a, b in zip(order[::2], order[1::2], strict=False):
        partner[a], partner[b] = b, a
    return partner


def neighbours(graph: str, members: Sequence[T], me: T, t: int, seed: int = 0) -> list[tuple[T, float]]:
    """The same by name: `members` sorted alike on all peers, `me` among them."""
    return [(members[i], share) for i, share in gives(graph, len(members), members.index(me), t, seed)]


def mixing(graph: str, n: int, t: int = 0, seed: int = 0) -> Matrix:
    """P of step t, (n, n), float64: columns sum to 1."""
    matrix = np.eye(n)
    for j in range(n):
        for i, share in gives(graph, n, j, t, seed):
            matrix[i, j] += share
            matrix[j, j] -= share
    return matrix


def contraction(graph: str, n: int) -> float:
    """Factor by which the distance to the mean shrinks in one step, in the long run, where all steps are taken at once.

    ring: exact. exponential: of L steps together, to the power 1/L; 0 where n is a power of 2. random-pairs: root of
    the expected factor of the squared distance, 1/2 (1 - 1/(n - 1)) for even n.
    """
    if n < 2:
        return 0.0
    mean = np.full((n, n), 1.0 / n)
    if graph == "ring":
        return _norm(mixing(graph, n) - mean)
    if graph == "exponential":
        cycle = np.eye(n)
        for t in range(hops(n)):
            cycle = mixing(graph, n, t) @ cycle
        eigenvalues = np.abs(np.linalg.eigvals(cycle - mean))
        return float(eigenvalues.max()) ** (1 / hops(n)) if eigenvalues.max() > 1e-12 else 0.0
    if graph != "random-pairs":
        raise UsageError(f"there is no graph {graph!r}; known: {', '.join(GRAPHS)}")
    # E[P^T P] = E[P]: P is a projection. A given peer is paired with probability q, and with each other alike.
    q = 1.0 if n % 2 == 0 else (n - 1) / n
    return float((1 - q / 2 - q / (2 * (n - 1))) ** 0.5)


def _norm(matrix: Matrix) -> float:
    return float(np.linalg.norm(matrix, 2))
