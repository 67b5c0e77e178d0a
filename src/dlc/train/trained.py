"""The parameters of one `dlc.DiLoCo`: that they are whole, stay what they were, and are trained by nobody else, and by
their own optimizer only where that counts."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dlc.arguments import instance
from dlc.errors import UsageError
from dlc.flat import FlatView, check_writable

log = logging.getLogger(__name__)

NAMES_TOLD = 3
_CLAIMS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The last claim to each parameter: its number, and a weak reference to the `Trained`; None where it was released."""
_MADE = itertools.count(1)
_CLAIMING = threading.Lock()
"""One at a time, in whatever thread."""
_newest = 0
"""Of all claims: where it is as it was, nobody's have changed."""


class Trained:
    """Looks at the model, the inner optimizer and the parameters of one DiLoCo. UsageError, when it is made: they do
    not belong together, or cannot be averaged."""

    def __init__(self, model: nn.Module | Sequence[nn.Parameter], inner: torch.optim.Optimizer) -> None:
        if not isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "param_groups"):
            raise UsageError(f"inner must be a torch optimizer, not {type(inner).__name__}")
        instance("model", model, (nn.Module, Iterable), "give a torch module, or its parameters")
        _check_bare(inner)
        self.view = FlatView.of(model) if isinstance(model, nn.Module) else FlatView(_parameters(model))
        self._model = model if isinstance(model, nn.Module) else None
        self._inner = inner
        self._check_whole()
        held = {id(parameter) for parameter in self._optimized()}
        if not any(id(tensor) in held for tensor in self.view.tensors):
            raise UsageError(
                "the optimizer holds none of the model's parameters, so its steps would not train it: make the "
                "optimizer from the parameters of this very model, after the last change of it"
            )
        for tensor in self.view.tensors:
            check_writable(tensor)
        self._form = self._formed()
        self._known = self._trainable()
        """Ids of the parameters that needed gradients when this was made, or have been named since."""
        self._frozen = self._still()
        """Names of those that are averaged and need no gradients, when this was made or as has been told since."""
        self._claimed = self._seen = 0
        """The number of the claim, and the newest one that was looked at since."""
        self._counting = self._told_of_stray = False
        self._tell_of_ranks()
        self.unwatch = self._watched()
        """Steps of the optimizer are somebody else's to count from now on."""

    def _check_whole(self) -> None:
        """UsageError: each process holds a part of each tensor."""
        modules = self._model.modules() if self._model is not None else ()
        wrapped: list[Any] = [m for m in modules if type(m).__name__ == "FullyShardedDataParallel"]
        sharded = any(m.process_group.size() > 1 and m.sharding_strategy.name != "NO_SHARD" for m in wrapped)
        flat = self._model is None and any(getattr(tensor, "_fsdp_flattened", False) for tensor in self.view.tensors)
        if sharded or flat or any(hasattr(tensor, "to_local") for tensor in self.view.tensors):
            raise UsageError(
                "the parameters are shards (FSDP): rounds would average a part of the model on one rank with another "
                "part on another. `torchrun ... -m dlc join --parallel fsdp` trains such a model; in a loop of your "
                "own, keep it whole (DDP)"
            )

    def _tell_of_ranks(self) -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            log.warning(
                "this process is one of %d ranks of torch.distributed: if they do not all make a dlc.DiLoCo, with a "
                "Peer each, the others do not see what a round changes. Broadcast the parameters after each round, or "
                "use `torchrun ... -m dlc join`, which does",
                distributed.get_world_size(),
            )

    # ---------------------------------------------------------------- nobody else's

    def claim(self) -> None:
        """From now on these parameters are trained by this DiLoCo, whoever did before."""
        global _newest
        with _CLAIMING:
            number = next(_MADE)
            for tensor in self.view.tensors:
                _CLAIMS[tensor] = (number, weakref.ref(self))
            _newest = self._claimed = self._seen = number

    def release(self) -> None:
        """They may be anybody's, as far as this is concerned, until `check_mine`."""
        self._seen = 0
        for tensor in self.view.tensors:
            if self._last_claim(tensor) == (self._claimed, self):
                _CLAIMS[tensor] = (self._claimed, None)

    def check_mine(self) -> None:
        """Before a step. UsageError: another DiLoCo was made over some of them, and is in use: both would offer the
        steps of both. Or it is not any more, and has trained them meanwhile."""
        if self._seen == _newest:
            return
        self.check_free()
        claims = [self._last_claim(tensor) for tensor in self.view.tensors]
        if any(number > self._claimed for number, _ in claims):
            raise UsageError(
                "another dlc.DiLoCo has trained these parameters meanwhile, and what it did is no part of this one's "
                "steps: call reload(), which takes the swarm's parameters and drops the steps that are in no round"
            )
        if any(owner is None for _, owner in claims):
            self.claim()
        self._seen = _newest

    def check_free(self) -> None:
        """UsageError: another DiLoCo was made over some of them, and is in use."""
        others = sum(self._last_claim(tensor)[1] not in (None, self) for tensor in self.view.tensors)
        if others:
            raise UsageError(
                f"another dlc.DiLoCo was made over {others} of these parameters, and each would count the steps of "
                "both: call unfollow() of the one that is not to go on, or finish() before the other is made; where it "
                "follows an optimizer and has no name any more, make a new optimizer. Several optimizers of one model "
                "need a dlc.DiLoCo each over the parameters of their own, dlc.DiLoCo([parameters], optimizer, ...)"
            )

    @staticmethod
    def _last_claim(tensor: Tensor) -> tuple[int, Trained | None]:
        """Its number, and whose it is, if that is in use."""
        claim: tuple[int, weakref.ref[Trained] | None] | None = _CLAIMS.get(tensor)  # type: ignore[no-untyped-call]
        if claim is None:
            return 0, None
        number, reference = claim
        return number, reference() if reference is not None else None

    # ---------------------------------------------------------------- steps

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """A step of the optimizer meanwhile is one that counts."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _watched(self) -> Callable[[], object]:
        """See each step of the optimizer until what this returns is called, or this is gone."""
        if not isinstance(self._inner, torch.optim.Optimizer):
            return lambda: None
        me = weakref.ref(self)

        def stepped(*_: object) -> None:
            if (trained := me()) is not None:
                trained._tell_of_stray()

        return weakref.finalize(self, self._inner.register_step_post_hook(stepped).remove)

    def _tell_of_stray(self) -> None:
        """Once: whoever steps the optimizer itself trains alone, and finds out when all of it is gone."""
        in_use = self._last_claim(self.view.tensors[0])[1] is self
        if in_use and not self._counting and not self._told_of_stray:
            self._told_of_stray = True
            log.warning(
                "the optimizer was stepped, and not by its dlc.DiLoCo, which does not count that step, so that no "
                "round is due for it: call the DiLoCo's step() in its place, or follow() once, which counts both"
            )

    # ---------------------------------------------------------------- what they were

    def check_same(self) -> None:
        """UsageError: other tensors are trained, or they are of another kind, than when this was made."""
        if self._formed() != self._form:
            raise UsageError(
                "the parameters have changed their dtype or shape since dlc.DiLoCo was made: bring the model into its "
                "form first, and make the DiLoCo then"
            )
        if gone := self._gone():
            raise UsageError(
                f"{gone} of the parameters are no part of the model any more, as after load_state_dict(assign=True), "
                "merged adapters or fully_shard, and what it learns would not be exchanged: put values into the "
                "parameters that it has (copy_), or make the optimizer and dlc.DiLoCo after the change, on another "
                "channel"
            )

    def _gone(self) -> int:
        """How many are no part of the model any more."""
        if self._model is None:
            return 0
        here = {id(p) for p in self._model.parameters()}
        return sum(id(tensor) not in here for tensor in self.view.tensors)

    def tell_of_gone(self) -> None:
        """At the end: the model does not have what the swarm has."""
        if gone := self._gone():
            log.warning(
                "%d of the parameters are no part of the model any more: those in their place are this peer's own, and "
                "not the swarm's newest",
                gone,
            )

    def tell_of_others(self) -> None:
        """Which parameters are averaged is settled when this is made: tell once of each that is trained and is not, or
        is averaged and trained no more."""
        still = self._still()
        if frozen := [name for name in still if name not in self._frozen]:
            self._frozen |= still
            log.warning(
                "%d parameters need no gradients any more (%s), but are averaged as before: the outer momentum, and "
                "what others train, moves them on; to keep them as they are, all peers make a DiLoCo without them, on "
                "another channel",
                len(frozen),
                _listed(frozen),
            )
        more = self._trainable() - self._known
        mine = {tensor.data_ptr() for tensor in self.view.tensors}  # of those that share memory the view has one
        foreign = {
            id(p)
            for p in self._optimized()
            if p.requires_grad and p.data_ptr() not in mine and self._last_claim(p)[1] is None
        } - self._known
        self._known |= more | foreign
        if more and self._model is not None:
            names = [name for name, p in self._model.named_parameters() if id(p) in more]
            log.warning(
                "%d parameters need gradients that did not when dlc.DiLoCo was made (%s): they are trained by this "
                "peer alone, and never averaged; make a DiLoCo on another channel, once they all do",
                len(names),
                _listed(names),
            )
        if foreign - more:
            log.warning(
                "the optimizer trains %d parameters that are none of those given to dlc.DiLoCo: they are trained by "
                "this peer alone, and never averaged; give dlc.DiLoCo a module that has them all",
                len(foreign - more),
            )

    def _optimized(self) -> Iterator[Tensor]:
        return (parameter for group in self._inner.param_groups for parameter in group["params"])

    def _still(self) -> dict[str, None]:
        """Names of the parameters that are averaged, and need no gradients now."""
        named = enumerate(zip(self.view.sizes(), self.view.tensors, strict=True))
        return {name or f"number {i}": None for i, ((name, _), tensor) in named if not tensor.requires_grad}

    def _trainable(self) -> set[int]:
        return {id(p) for p in self._model.parameters() if p.requires_grad} if self._model is not None else set()

    def _formed(self) -> list[tuple[torch.dtype, torch.Size]]:
        return [(tensor.dtype, tensor.shape) for tensor in self.view.tensors]


def _parameters(given: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """UsageError: these are no tensors."""
    many = list(given)
    for parameter in many:
        if not isinstance(parameter, Tensor):
            raise UsageError(
                f"model must be a module, or its parameters, not {type(parameter).__name__}s: of groups of parameters "
                "give the parameters of all, one after the other"
            )
    return many


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:NAMES_TOLD], "..."] if len(names) > NAMES_TOLD else names)


def _check_bare(inner: torch.optim.Optimizer) -> None:
    """UsageError: a framework's wrapper, whose `step` may make none."""
    of_lightning = any(kind.__name__ == "LightningOptimizer" for kind in type(inner).__mro__)
    if hasattr(inner, "step_was_skipped") or of_lightning:  # the first is accelerate's
        raise UsageError(
            f"{type(inner).__name__} wraps an optimizer, and makes no step where gradients are accumulated: give "
            "dlc.DiLoCo the optimizer itself (its .optimizer), call follow(), and step the wrapper"
        )
