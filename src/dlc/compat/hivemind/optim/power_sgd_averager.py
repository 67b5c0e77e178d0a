"""`PowerSGDGradientAverager`: gradients averaged as products of two thin matrices (PowerSGD, arXiv:1905.13727).

    M_i     this peer's sums as a matrix, with what earlier rounds left out of them (error feedback)
    P       = mean of M_i Q, the columns made orthonormal       first exchange; Q is that of the round before
    Q       = mean of M_i^T P                                   second one, together with the small tensors as they are
    result  = P Q^T on all peers; M_i - P Q^T is kept for the next round

For orthonormal P the result is P P^T times the mean of all M_i: the mean, projected onto the columns of P. That holds
for every P, and for whoever takes part in the second exchange, as long as all of them have the same P. Hence:

- The second exchange is looked for under a digest of P, so that nobody with another one can be met.
- P is made orthonormal, and multiplied with Q, by elementwise steps in a fixed order: equal bits on any host.
- A round that fails in either exchange changes nothing, what is kept of earlier rounds included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm import vectors
from dlc.compat.hivemind.averaging.averager import PATIENCE_S_MIN
from dlc.compat.hivemind.averaging.control import StepControl
from dlc.compat.hivemind.optim.grad_averager import GradientAverager
from dlc.compat.hivemind.refused import refuse
from dlc.compat.hivemind.swarm import Outcome, Parts, key_of
from dlc.compat.hivemind.utils.background import in_background
from dlc.errors import UsageError
from dlc.flat import finite, flatten_tensors, unflatten_into

SECOND_S = 60.0
"""How long those of the first exchange wait at most for each other before the second: some multiply for longer."""
DEPENDENT = 1e-6
"""A column of which the others leave less than this share of its length is theirs already: the rest is rounding."""
BLOCK_ELEMS = 1 << 18
"""Of a product that is made at once: it stays in the cache while one column after the other is added."""


@dataclass
class LowRank:
    """What one matrix keeps from round to round."""

    rows: int
    columns: int
    start: Tensor
    """fp32 [columns, rank]: the first Q, the same on all peers."""
    q: Tensor = field(init=False)
    """fp32 [columns, rank]: that of the last round."""
    error: Tensor = field(init=False)
    """fp32 [rows, columns]: what the rounds so far left out of this peer's sums."""

    def __post_init__(self) -> None:
        self.q, self.error = self.start, vectors.zeros(self.rows * self.columns).view(self.rows, self.columns)

    def keep(self, q: Tensor, error: Tensor) -> None:
        """Of a round; what is not finite (an overflow of the loss scale) is forgotten, and does not come again."""
        sound = finite(q) and finite(error)
        # A column of zeros would stay one for ever: its direction is looked for anew.
        self.q = torch.where(q.any(0), q, self.start) if sound else self.start
        self.error = error if sound else torch.zeros_like(error)


class PowerSGDGradientAverager(GradientAverager):
    """A `GradientAverager` that sends matrices of `averager_rank` columns in place of most gradients.

    A gradient counts as a matrix: of three and more dimensions, those with the smallest product become one. It is sent
    as it is if it has one dimension, or if that would save less than the share `min_compression_ratio` of its elements.
    Both are the same on all peers. Needs one more fp32 copy of the gradients, for the error. Others: GradientAverager.

    UsageError: a rank below 1. NotOffered: auxiliary, since such a peer learns no mean, and so no P.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        averager_rank: int,
        *,
        min_compression_ratio: float = 0.5,
        auxiliary: bool = False,
        **kwargs: Any,
    ) -> None:
        if averager_rank < 1:
            raise UsageError(f"averager_rank must be at least 1, not {averager_rank}")
        if auxiliary:
            raise refuse("PowerSGDGradientAverager(auxiliary=True)", "give it to a peer with a plain GradientAverager")
        parameters = tuple(parameters)
        self.rank = averager_rank
        self._scheme = f"PowerSGD {averager_rank} {min_compression_ratio:g}"
        self._low: dict[int, LowRank] = {}
        """By index of the parameter; the others are sent as they are."""
        for index, parameter in enumerate(parameters):
            rows, columns = as_matrix(parameter.shape)
            saved = 1 - averager_rank * (rows + columns) / max(parameter.numel(), 1)
            if parameter.dim() > 1 and parameter.numel() and saved >= min_compression_ratio:
                generator = torch.Generator().manual_seed(index)
                shape = columns, averager_rank
                start = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
                self._low[index] = LowRank(rows, columns, start)
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """Q and error of the round that was just made."""
        super().__init__(parameters, **kwargs)

    # ---------------------------------------------------------------- a round

    def _average(self, control: StepControl, parts: Parts, data: bytes) -> Outcome | None:
        if not self._low:
            return super()._average(control, parts, data)
        parts[:] = [(flat.clone(), codec) for flat, codec in parts]
        swarm, terms, tensors = self.dht.swarm, self._terms(control, data), self._views(parts)
        sums = {i: low.error + tensors[i].view(low.rows, low.columns) for i, low in self._low.items()}

        ps = {i: sums[i] @ low.q for i, low in self._low.items()}
        packed = self._packed(ps)
        first = swarm.average(self._key(control), packed, terms)
        if first is None:
            return None
        self._unpack(packed, ps)
        ps = {i: orthonormal(p) for i, p in ps.items()}

        pieces = {**tensors, **{i: sums[i].T @ p for i, p in ps.items()}}
        packed = self._packed(pieces)
        together = frozenset(first.members)
        patience_s = max(min(terms.budget_s, control.get_timeout(), SECOND_S), PATIENCE_S_MIN)
        again = replace(
            terms, target=None, patience_s=patience_s, expected=lambda: together & swarm.present(), formed=lambda: None
        )
        second = swarm.average(f"{key_of(self.prefix)}/q/{_digest(self._key(control), ps)}", packed, again)
        if second is None:
            return None
        self._unpack(packed, pieces)
        for i, p in ps.items():
            mean = product(p, pieces[i])
            tensors[i].copy_(mean.view(tensors[i].shape))
            self._made[i] = pieces[i], sums[i].sub_(mean)
        lost = {peer: first.missing.get(peer, "left") for peer in together - frozenset(second.members)}
        return replace(second, missing={**lost, **second.missing})

    def _take(self, before: Parts, means: Parts, outcome: Outcome, number: int) -> None:
        super()._take(before, means, outcome, number)
        made, self._made = self._made, {}
        for i, (q, error) in made.items():
            self._low[i].keep(q, error)

    def _views(self, parts: Parts) -> dict[int, Tensor]:
        """The tensors in the parts, by index."""
        views = {}
        for (flat, _), many in zip(parts, self._of.values(), strict=True):
            shapes = [self.parameters[i].shape for i in many]
            for i, shape, piece in zip(
                many, shapes, torch.split(flat, [shape.numel() for shape in shapes]), strict=True
            ):
                views[i] = piece.view(shape)
        return views

    def _packed(self, pieces: Mapping[int, Tensor]) -> Parts:
        """One flat vector for each codec."""
        chosen = {codec: [pieces[i] for i in many if i in pieces] for codec, many in self._of.items()}
        return [(flatten_tensors(many), codec) for codec, many in chosen.items() if many]

    def _unpack(self, packed: Parts, pieces: Mapping[int, Tensor]) -> None:
        """The reverse, in place."""
        for flat, codec in packed:
            unflatten_into(flat, [pieces[i] for i in self._of[codec] if i in pieces])

    # ---------------------------------------------------------------- state for others

    def get_current_state(self) -> tuple[Any, ...]:
        """Every Q, in the order of the parameters: who comes late then begins with a good one."""
        return {"group_bits": self.get_group_bits()}, [low.q.clone() for low in self._low.values()]

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Take over what `get_current_state` of another peer gives; returns it, or None where there is none."""
        if not wait:
            return in_background(lambda: self.load_state_from_peers(timeout=timeout), "load")
        loaded = super().load_state_from_peers(timeout=timeout)
        if loaded is not None:
            _, qs = loaded
            if [q.shape for q in qs] != [low.q.shape for low in self._low.values()]:
                raise UsageError("the donor's matrices have other shapes: all peers need the same model and rank")
            with self.get_tensors():
                for low, q in zip(self._low.values(), qs, strict=True):
                    low.keep(q.float(), low.error)
        return loaded


# ------------------------------------------------------------------ arithmetic that gives equal bits everywhere


def as_matrix(shape: Iterable[int]) -> tuple[int, int]:
    """Rows and columns: neighbouring dimensions are joined, those of the smallest product first, until two are left."""
    dims = list(shape)
    while len(dims) > 2:
        at = min(range(len(dims) - 1), key=lambda k: dims[k] * dims[k + 1])
        dims[at : at + 2] = [dims[at] * dims[at + 1]]
    return (dims[0], dims[1]) if len(dims) == 2 else (1, math.prod(dims))


def orthonormal(p: Tensor) -> Tensor:
    """The columns of p (fp32 [rows, rank]) made orthonormal, by Gram-Schmidt done twice, in float64.

    A column that depends on those before it becomes zero.
    """
    basis = p.double().T.contiguous()
    for k, column in enumerate(basis):
        length = _norm(column)
        for _ in range(2):
            if k:
                along = _sum((basis[:k] * column).T)
                column = column - _sum(along[:, None] * basis[:k])
        left = _norm(column)
        basis[k] = column / left if left > DEPENDENT * length else torch.zeros_like(column)
    return basis.T.to(torch.float32).contiguous()


def product(p: Tensor, q: Tensor) -> Tensor:
    """p q^T (fp32), its terms added in the order of the columns."""
    rows = []
    for part in torch.split(p, max(1, BLOCK_ELEMS // len(q))):
        total = part[:, :1] * q[:, 0]
        for k in range(1, p.shape[1]):
            total += part[:, k : k + 1] * q[:, k]
        rows.append(total)
    return torch.cat(rows)


def _sum(x: Tensor) -> Tensor:
    """Over the first dimension, by halves: elementwise sums only."""
    while len(x) > 1:
        half = len(x) // 2
        x = torch.cat((x[:half] + x[half : 2 * half], x[2 * half :]))
    return x[0]


def _norm(x: Tensor) -> float:
    return math.sqrt(float(_sum(x * x)))


def _digest(key: str, ps: Mapping[int, Tensor]) -> str:
    hasher = blake3(key.encode())
    for p in ps.values():
        hasher.update(p.view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest(16)


__all__ = ["PowerSGDGradientAverager"]
