"""The replicated outer state of one training channel: theta, and the moments that the outer optimizer keeps of it.

    g = theta - theta_local                          pseudo-gradient of one peer (DiLoCo, arXiv:2311.08105)
    theta, moments <- step(theta, moments, g)        g is now the mean over the contributors; see `outer_step`

Every peer applies the same means in the same order, so all hold the same bits.

Where the model is cut into fragments, a round moves one of them, and the others stay as they are: each has steps of its
own, which the schedule and Adam's bias correction count.

Memory in bytes per parameter: sgd 4 (theta), nesterov 8, adam 12.

Threads: the driver's thread calls `step`, `digest`, `export` and `restore`, the trainer's thread `read` and `lend`; one
lock guards them all. A step works in slices with one reused scratch buffer, and allocates nothing that grows with the
vector but where the old theta is lent.

    lend ──> theta of now, without a copy ──(theta is about to move)──> kept: the state goes on in a copy
                                                                    └──> gone: the borrower said it may be spent

An error in the middle of a step (from the iterable of means, or no memory for the copy) leaves a torn state: every
later call but `restore` raises `DlcError`, so that a half-applied round is never read, exported or trained on.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm import vectors
from dlc.errors import CheckpointError, ConfigError, DlcError, UsageError
from dlc.flat import UNKNOWN_LAYOUT, Layout
from dlc.runspec import OUTER_OPTIMIZERS, OUTER_SCHEDULES, OuterSpec
from dlc.train.fragments import Fragments
from dlc.train.outer_step import outer_lr, rule_of

SLICE_ELEMENTS_MAX = 256 * 1024
"""Elements a step works on at a time: 1 MiB of scratch, which stays in a core's second-level cache."""
HASH_THREADED_BYTES_MIN = 16 * 2**20
"""Below this many bytes starting the hash's threads costs more than it saves."""

IMAGE_MAGIC = b"dlcouter"
IMAGE_VERSION = 2
IMAGE_HEADER = struct.Struct("<8sIIQQ4I6d8s8s8s8x")
"""magic, version, reserved, t, numel, what `_hyperparameters` names, how the model is cut into fragments, and `Layout`;
128 bytes, so that theta is aligned."""
HYPERPARAMETERS = "optimizer schedule warmup_rounds total_rounds lr min_lr_ratio momentum beta1 beta2 eps".split()
SCHEDULE_END = ("schedule", "total_rounds")
"""Those that follow from the length of a run: the inner schedule of data-parallel training is constant in an endless
one."""


def pseudo_gradient(theta: Tensor, local: Tensor, out: Tensor) -> Tensor:
    """out <- theta - local, all flat fp32: what one peer contributes; `out` may be `local`."""
    return torch.sub(theta, local, out=out)


def theta_of(image: memoryview | bytes) -> Tensor:
    """The parameters in an exported image, flat fp32; CheckpointError where it is none."""
    view = memoryview(image).cast("B")
    numel = IMAGE_HEADER.unpack_from(view)[4] if view.nbytes >= IMAGE_HEADER.size else 0
    if not numel or IMAGE_HEADER.unpack_from(view)[:2] != (IMAGE_MAGIC, IMAGE_VERSION):
        raise CheckpointError(f"no dlc state image of version {IMAGE_VERSION}")
    if view.nbytes < IMAGE_HEADER.size + 4 * numel:
        raise CheckpointError("the state image is cut short")
    return torch.from_numpy(np.frombuffer(view, "<f4", numel, IMAGE_HEADER.size).astype(np.float32))


class Lent:
    """theta of a state at one moment, in the state's own memory; to be read only. It stays as it is, whatever the state
    does, until it is `gone`."""

    def __init__(self, theta: Tensor, lock: threading.Lock) -> None:
        self._theta: Tensor | None = theta
        self._lock = lock
        self._spent_by: Callable[[], bool] | None = None

    @property
    def theta(self) -> Tensor:
        """fp32, 1-D. UsageError: it is gone."""
        if self._theta is None:
            raise UsageError("inner steps were made while a contribution was on its way without overlap: wait for it")
        return self._theta

    def spend(self, by: Callable[[], bool]) -> None:
        """It is gone with the next step that begins while `by()` holds. That is asked by the thread that steps, which
        has the state's lock, and at other steps as well."""
        with self._lock:
            self._spent_by = by

    def reclaim(self) -> bool:
        """Take `spend` back. False: it is gone already."""
        with self._lock:
            self._spent_by = None
            return self._theta is not None

    def end(self) -> None:
        """It is gone."""
        self._theta = None

    def outlives_step(self) -> bool:
        """Whether it still has to be as it is once theta has moved; gone otherwise. For the state, under its lock."""
        if self._spent_by is not None and self._spent_by():
            self.end()
        return self._theta is not None


class OuterState:
    """Outer parameters and moments of one channel, with the step that moves them.

    `theta` (fp32, CPU, 1-D) is copied; the moments start at zero. `spec`: the outer optimizer; one with a schedule that
    ends needs `total_rounds` (ConfigError). `fragments`: what each round moves; the whole of theta if not given.
    `layout`: what theta's elements are; with a restored image it is that image's.
    """

    def __init__(
        self,
        theta: Tensor,
        spec: OuterSpec,
        *,
        t: int = 0,
        slice_elements: int = SLICE_ELEMENTS_MAX,
        fragments: Fragments | None = None,
        layout: Layout = UNKNOWN_LAYOUT,
    ) -> None:
        if theta.dtype != torch.float32 or theta.device.type != "cpu" or theta.dim() != 1:
            raise UsageError(f"theta must be 1-D float32 on the CPU, not {theta.dim()}-D {theta.dtype} {theta.device}")
        if not 1 <= slice_elements <= SLICE_ELEMENTS_MAX:
            raise UsageError(f"slice_elements must lie in 1 ... {SLICE_ELEMENTS_MAX}, not {slice_elements}")
        if spec.schedule != "constant" and not spec.total_rounds:
            raise ConfigError(f"outer.schedule is {spec.schedule!r}: say with outer.total_rounds where it ends")
        self.size = theta.numel()
        """Elements of theta."""
        self.fragments = fragments if fragments is not None else Fragments.whole(self.size)
        self.numel = self.fragments.packed_numel
        """Elements that a round averages."""
        if self.fragments.numel != self.size:
            raise UsageError(
                f"fragments of {self.fragments.numel} elements do not make up theta, which has {self.size}"
            )
        self.spec = spec
        self._layout = layout
        self._rule = rule_of(spec)
        with torch.inference_mode(False):  # the driver writes them, and is in no mode of the caller's
            self._theta = theta.detach().clone(memory_format=torch.contiguous_format)
            self._moments = [torch.zeros_like(self._theta) for _ in range(self._rule.n_moments)]
        self._t = t
        self._scratch = vectors.empty(min(slice_elements, self.size))
        self._slice = slice_elements
        self._lock = threading.Lock()
        self._torn = False
        self._lent: Lent | None = None
        """Has theta's memory."""

    @property
    def t(self) -> int:
        """The last round that was applied."""
        return self._t

    def step(self, t: int, means: Iterable[tuple[int, int, Tensor | None]]) -> None:
        """Apply round t: for each (start, stop, mean) the fp32 mean pseudo-gradient of elements [start, stop) of what
        the round averages.

        Ranges ascend and do not overlap. A range without a mean (None: nobody contributed), or not named, keeps theta
        and the moments as they are. A mean may be reused by the caller once the next one is asked for.
        """
        with self._lock:
            self._check_whole()
            if t <= self._t:
                raise UsageError(f"round {t} cannot follow round {self._t}")
            self._torn = True  # also if there is no memory for the copy: what is lent is not to be moved later
            if self._lent is not None and self._lent.outlives_step():
                self._theta = self._theta.clone()
            self._lent = None
            done, fragment, turn = 0, self.fragments.of_round(t), self.fragments.turn(t)
            lr = outer_lr(self.spec, turn)
            for start, stop, mean in means:
                if not done <= start <= stop <= self.numel:
                    raise UsageError(f"range [{start}, {stop}) does not follow {done} within {self.numel} elements")
                done = stop
                if mean is None:
                    continue
                if mean.dtype != torch.float32 or mean.device.type != "cpu" or mean.shape != (stop - start,):
                    raise UsageError(f"the mean of [{start}, {stop}) is {tuple(mean.shape)} {mean.dtype} {mean.device}")
                for a, b, at in self.fragments.pieces(fragment, start, stop):
                    self._step_range(turn, lr, a, b, mean[at - start : at - start + b - a])
            self._t = t
            self._torn = False

    def _step_range(self, turn: int, lr: float, start: int, stop: int, mean: Tensor) -> None:
        """Elements [start, stop) of theta."""
        with torch.no_grad():
            for a in range(start, stop, self._slice):
                b = min(a + self._slice, stop)
                moments = [moment[a:b] for moment in self._moments]
                part = mean[a - start : b - start]
                self._rule.apply(turn, lr, self._theta[a:b], moments, part, self._scratch[: b - a])

    def foresee(self, t: int, g: Tensor, out: Tensor) -> bool:
        """out <- the fragment of theta after round t, if its mean were g; both packed fp32. Nothing is changed.

        False: t is not the next round, or is not any more. The lock is held for a slice at a time: whoever copies the
        image meanwhile, for a newcomer, must be heard of.
        """
        fragment, turn = self.fragments.of_round(t), self.fragments.turn(t)
        lr = outer_lr(self.spec, turn)
        for start, stop, at in self.fragments.pieces(fragment):
            for a in range(start, stop, self._slice):
                b = min(a + self._slice, stop)
                part = slice(at + a - start, at + b - start)
                with self._lock, torch.no_grad():
                    self._check_whole()
                    if t != self._t + 1:
                        return False
                    moments = [moment[a:b].clone() for moment in self._moments]
                    out[part] = self._theta[a:b]
                    self._rule.apply(turn, lr, out[part], moments, g[part], self._scratch[: b - a])
        return True

    def digest(self) -> bytes:
        """BLAKE3-256 of the image: equal exactly where the outer states are."""
        with self._lock:
            self._check_whole()
            threads = blake3.AUTO if self.image_bytes() > HASH_THREADED_BYTES_MIN else 1
            hasher = blake3(self._header(), max_threads=threads)
            for vector in self._vectors():
                hasher.update(_portable(vector))
            return hasher.digest()

    def read(self, out: Tensor) -> int:
        """Copy theta into `out` (fp32, `size` elements) and return the round it belongs to."""
        if out.dtype != torch.float32 or out.shape != (self.size,):
            raise UsageError(f"theta is float32 ({self.size},), the target {out.dtype} {tuple(out.shape)}")
        with self._lock:
            self._check_whole()
            out.copy_(self._theta)
            return self._t

    def lend(self) -> Lent:
        """theta as it is now, without a copy. There is one loan at a time: the one before is gone."""
        with self._lock:
            self._check_whole()
            if self._lent is not None:
                self._lent.end()
            self._lent = Lent(self._theta, self._lock)
            return self._lent

    def vectors(self) -> tuple[int, list[Tensor]]:
        """The last round that was applied, and copies of theta and the moments after it (fp32, CPU, `numel` each)."""
        with self._lock:
            self._check_whole()
            return self._t, [vector.clone() for vector in self._vectors()]

    def load_moments(self, moments: Sequence[Tensor]) -> None:
        """Go on with these (fp32, `numel` each; copied) in place of the present ones: before the first round only.

        UsageError, with nothing changed: there were rounds, or their number or form is another.
        """
        if self._t or [m.shape for m in moments] != [self._theta.shape] * len(self._moments):
            raise UsageError(
                f"{len(moments)} moments after {self._t} rounds: before the first round {len(self._moments)} of "
                f"{self.numel} elements can be loaded"
            )
        with self._lock:
            for own, given in zip(self._moments, moments, strict=True):
                own.copy_(given)

    def image_bytes(self) -> int:
        """Size of an exported image in bytes."""
        return IMAGE_HEADER.size + 4 * self.size * (1 + len(self._moments))

    def export(self) -> memoryview:
        """A frozen little-endian image, [header][theta][moments], that later steps do not touch. Allocates it all."""
        image = np.empty(self.image_bytes(), np.uint8)  # a bytearray is zeroed while nobody else can run
        with self._lock:
            self._check_whole()
            image[: IMAGE_HEADER.size] = np.frombuffer(self._header(), np.uint8)
            for index, vector in enumerate(self._vectors()):
                np.frombuffer(image, "<f4", self.size, self._place(index))[:] = vector.numpy()
        return image.data.toreadonly()

    def copy_image(self, start: int, out: memoryview) -> None:
        """The bytes of the image from `start` on that fill `out`; the same image until the next step."""
        end = start + out.nbytes
        with self._lock:
            self._check_whole()
            at = 0
            for part in (memoryview(self._header()), *map(_portable, self._vectors())):
                a, b = max(start, at), min(end, at + part.nbytes)
                if a < b:
                    out[a - start : b - start] = part[a - at : b - at]
                at += part.nbytes

    def restore(self, image: memoryview | bytes, any_end: bool = False) -> None:
        """Become the state of `image`; CheckpointError, with nothing changed, where it belongs to another run.

        any_end: the schedule there may have another end, or none; from now on it is that of this state.
        A writable image is not copied where its byte order is ours: its memory is the state's from now on.
        """
        view = memoryview(image).cast("B")
        if view.nbytes < IMAGE_HEADER.size:
            raise CheckpointError(f"the state image has only {view.nbytes} bytes")
        magic, version, _, t, numel, *theirs, cut, shapes, names = IMAGE_HEADER.unpack_from(view)
        if (magic, version) != (IMAGE_MAGIC, IMAGE_VERSION):
            raise CheckpointError(f"no dlc state image of version {IMAGE_VERSION} (found {magic!r}, version {version})")
        if numel != self.size:
            raise CheckpointError(f"the state image holds {numel} parameters, this model {self.size}")
        layout = Layout(shapes, names)
        if why := self._layout.differs(layout):
            raise CheckpointError(f"the state image holds as many parameters as this model, but {why}")
        mine = _hyperparameters(self.spec)
        pairs = zip(HYPERPARAMETERS, _named(theirs), _named(mine), strict=True)
        free = SCHEDULE_END if any_end else ()
        differ = [
            f"{name} {there!r}, here {here!r}" for name, there, here in pairs if there != here and name not in free
        ]
        if differ:
            raise CheckpointError(f"the state image is of another outer step: {'; '.join(differ)}")
        if cut != self.fragments.fingerprint:
            raise CheckpointError("the state image is of a model that was cut into other fragments, or into none")
        if view.nbytes != self.image_bytes():
            raise CheckpointError(f"the state image has {view.nbytes} bytes, this model needs {self.image_bytes()}")
        arrays = [np.frombuffer(view, "<f4", numel, self._place(index)) for index in range(1 + len(self._moments))]
        with self._lock:
            lent, self._lent = self._lent, None
            if not view.readonly and arrays[0].flags.aligned and sys.byteorder == "little" and numel:
                self._theta, *self._moments = map(torch.from_numpy, arrays)
            else:
                if lent is not None:
                    self._theta = torch.empty_like(self._theta)
                for vector, array in zip(self._vectors(), arrays, strict=True):
                    vector.numpy()[:] = array
            self._t, self._layout = t, layout
            self._torn = False

    def _vectors(self) -> tuple[Tensor, ...]:
        """In the order of the image."""
        return (self._theta, *self._moments)

    def _place(self, index: int) -> int:
        """Where the vector lies in the image, in bytes."""
        return IMAGE_HEADER.size + 4 * self.size * index

    def _header(self) -> bytes:
        named, cut = _hyperparameters(self.spec), self.fragments.fingerprint
        return IMAGE_HEADER.pack(IMAGE_MAGIC, IMAGE_VERSION, 0, self._t, self.size, *named, cut, *self._layout)

    def _check_whole(self) -> None:
        if self._torn:
            raise DlcError("the outer state is torn: a step failed half-way; restore it from an image of another peer")


def _hyperparameters(spec: OuterSpec) -> tuple[float, ...]:
    """What the bits of a step depend on, as the header holds it, in the order of HYPERPARAMETERS."""
    names = OUTER_OPTIMIZERS.index(spec.optimizer), OUTER_SCHEDULES.index(spec.schedule)
    rates = spec.lr, spec.min_lr_ratio, spec.momentum, *spec.betas, spec.eps
    return (*names, spec.warmup_rounds, spec.total_rounds, *rates)


def _named(values: Sequence[float]) -> list[object]:
    """The same for people; a number where the name is not known here."""
    optimizers, schedules = dict(enumerate(OUTER_OPTIMIZERS)), dict(enumerate(OUTER_SCHEDULES))
    optimizer, schedule = int(values[0]), int(values[1])
    return [optimizers.get(optimizer, optimizer), schedules.get(schedule, schedule), *values[2:]]


def _portable(vector: Tensor) -> memoryview:
    """The vector's own memory as little-endian bytes; a copy only on a big-endian host."""
    array = vector.numpy().astype("<f4", copy=False)
    return array.data.cast("B") if array.size else memoryview(b"")
