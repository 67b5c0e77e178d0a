"""The outer step: replicated state (theta, m) of one training channel.

    g = theta - theta_local                pseudo-gradient of one peer (DiLoCo, arXiv:2311.08105)
    m     <- mu * m + g                    g is now the mean over the contributors of the round
    theta <- theta - lr * (g + mu * m)     Nesterov, as torch.optim.SGD(nesterov=True)

Every peer applies the same means in the same order, so all hold the same bits. That needs arithmetic that IEEE 754
fixes: float32 elementwise multiply, add and subtract on the CPU, each rounded on its own. The forms that fuse two of
them (`add_(alpha=...)`, `addcmul_`, `lerp_`) may round once on one machine and twice on another: none is used here.
lr and mu are rounded to float32 once, at creation.

Threads: the driver's thread calls `step`, `digest`, `export` and `restore`, the trainer's thread `read`; one lock
guards them all. A step works in slices with one reused scratch buffer and allocates nothing that grows with the vector.

An error in the middle of a step (from the iterable of means) leaves a torn state: every later call but `restore` raises
`DlcError`, so that a half-applied round is never read, exported or trained on.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterable

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from dlc.errors import CheckpointError, DlcError, UsageError

SLICE_ELEMENTS_MAX = 256 * 1024
"""Elements a step works on at a time: 1 MiB of scratch, which stays in a core's second-level cache."""
HASH_THREADED_BYTES_MIN = 16 * 2**20
"""Below this many bytes starting the hash's threads costs more than it saves."""

IMAGE_MAGIC = b"dlcouter"
IMAGE_VERSION = 1
IMAGE_HEADER = struct.Struct("<8sIIqQff24x")
"""magic, version, reserved, t, numel, lr, mu; 64 bytes, so that theta is aligned."""


def pseudo_gradient(theta: Tensor, local: Tensor, out: Tensor) -> Tensor:
    """out <- theta - local, all flat fp32: what one peer contributes; `out` may be `local`."""
    return torch.sub(theta, local, out=out)


class OuterState:
    """Outer parameters and momentum of one channel, with the step that moves both.

    `theta` (fp32, CPU, 1-D) is copied; momentum starts at zero.
    """

    def __init__(
        self, theta: Tensor, *, lr: float, momentum: float, t: int = 0, slice_elements: int = SLICE_ELEMENTS_MAX
    ) -> None:
        if theta.dtype != torch.float32 or theta.device.type != "cpu" or theta.dim() != 1:
            raise UsageError(f"theta must be 1-D float32 on the CPU, not {theta.dim()}-D {theta.dtype} {theta.device}")
        if not 1 <= slice_elements <= SLICE_ELEMENTS_MAX:
            raise UsageError(f"slice_elements must lie in 1 ... {SLICE_ELEMENTS_MAX}, not {slice_elements}")
        self.numel = theta.numel()
        self._theta = theta.detach().clone(memory_format=torch.contiguous_format)
        self._m = torch.zeros_like(self._theta)
        self._lr = float(np.float32(lr))
        self._mu = float(np.float32(momentum))
        self._t = t
        self._scratch = torch.empty(min(slice_elements, self.numel), dtype=torch.float32)
        self._slice = slice_elements
        self._lock = threading.Lock()
        self._torn = False

    @property
    def t(self) -> int:
        """The last round that was applied."""
        return self._t

    def step(self, t: int, means: Iterable[tuple[int, int, Tensor | None]]) -> None:
        """Apply round t: for each (start, stop, mean) the fp32 mean pseudo-gradient of elements [start, stop).

        Ranges ascend and do not overlap. A range without a mean (None: nobody contributed), or not named, keeps theta
        and m as they are. A mean may be reused by the caller once the next one is asked for.
        """
        with self._lock:
            self._check_whole()
            if t <= self._t:
                raise UsageError(f"round {t} cannot follow round {self._t}")
            self._torn = True
            done = 0
            for start, stop, mean in means:
                if not done <= start <= stop <= self.numel:
                    raise UsageError(f"range [{start}, {stop}) does not follow {done} within {self.numel} elements")
                done = stop
                if mean is not None:
                    self._step_range(start, stop, mean)
            self._t = t
            self._torn = False

    def _step_range(self, start: int, stop: int, mean: Tensor) -> None:
        if mean.dtype != torch.float32 or mean.device.type != "cpu" or mean.shape != (stop - start,):
            raise UsageError(f"the mean of [{start}, {stop}) is {tuple(mean.shape)} {mean.dtype} {mean.device}")
        with torch.no_grad():
            for a in range(start, stop, self._slice):
                b = min(a + self._slice, stop)
                g, m, theta, x = mean[a - start : b - start], self._m[a:b], self._theta[a:b], self._scratch[: b - a]
                m.mul_(self._mu)
                m.add_(g)
                torch.mul(m, self._mu, out=x)
                x.add_(g)
                x.mul_(self._lr)
                theta.sub_(x)

    def digest(self) -> bytes:
        """BLAKE3-256 of t, lr, mu, theta and m: equal exactly where the outer states are."""
        with self._lock:
            self._check_whole()
            threads = blake3.AUTO if self.image_bytes() > HASH_THREADED_BYTES_MIN else 1
            hasher = blake3(self._header(), max_threads=threads)
            hasher.update(_portable(self._theta))
            hasher.update(_portable(self._m))
            return hasher.digest()

    def read(self, out: Tensor) -> int:
        """Copy theta into `out` (fp32, `numel` elements) and return the round it belongs to."""
        if out.dtype != torch.float32 or out.shape != (self.numel,):
            raise UsageError(f"theta is float32 ({self.numel},), the target {out.dtype} {tuple(out.shape)}")
        with self._lock:
            self._check_whole()
            out.copy_(self._theta)
            return self._t

    def image_bytes(self) -> int:
        """Size of an exported image in bytes."""
        return IMAGE_HEADER.size + 8 * self.numel

    def export(self) -> memoryview:
        """A frozen little-endian image, [header][theta][m], that later steps do not touch. Allocates a whole image."""
        image = bytearray(self.image_bytes())
        middle = IMAGE_HEADER.size + 4 * self.numel
        with self._lock:
            self._check_whole()
            image[: IMAGE_HEADER.size] = self._header()
            np.frombuffer(image, "<f4", self.numel, IMAGE_HEADER.size)[:] = self._theta.numpy()
            np.frombuffer(image, "<f4", self.numel, middle)[:] = self._m.numpy()
        return memoryview(image).toreadonly()

    def copy_image(self, start: int, out: memoryview) -> None:
        """The bytes of the image from `start` on that fill `out`; the same image until the next step."""
        end = start + out.nbytes
        with self._lock:
            self._check_whole()
            at = 0
            for part in (memoryview(self._header()), _portable(self._theta), _portable(self._m)):
                a, b = max(start, at), min(end, at + part.nbytes)
                if a < b:
                    out[a - start : b - start] = part[a - at : b - at]
                at += part.nbytes

    def restore(self, image: memoryview | bytes) -> None:
        """Become the state of `image`; CheckpointError, with nothing changed, where it belongs to another run.

        A writable image is not copied where its byte order is ours: its memory is the state's from now on.
        """
        view = memoryview(image).cast("B")
        if view.nbytes != self.image_bytes():
            raise CheckpointError(f"the state image has {view.nbytes} bytes, this model needs {self.image_bytes()}")
        magic, version, _, t, numel, lr, mu = IMAGE_HEADER.unpack_from(view)
        if (magic, version) != (IMAGE_MAGIC, IMAGE_VERSION):
            raise CheckpointError(f"no dlc state image of version {IMAGE_VERSION} (found {magic!r}, version {version})")
        if numel != self.numel:
            raise CheckpointError(f"the state image holds {numel} parameters, this model {self.numel}")
        if (lr, mu) != (self._lr, self._mu):
            raise CheckpointError(f"the state image is of outer lr {lr}, momentum {mu}; here {self._lr}, {self._mu}")
        theta = np.frombuffer(view, "<f4", numel, IMAGE_HEADER.size)
        m = np.frombuffer(view, "<f4", numel, IMAGE_HEADER.size + 4 * numel)
        with self._lock:
            if not view.readonly and theta.flags.aligned and sys.byteorder == "little" and numel:
                self._theta, self._m = torch.from_numpy(theta), torch.from_numpy(m)
            else:
                self._theta.numpy()[:] = theta
                self._m.numpy()[:] = m
            self._t = t
            self._torn = False

    def _header(self) -> bytes:
        return IMAGE_HEADER.pack(IMAGE_MAGIC, IMAGE_VERSION, 0, self._t, self.numel, self._lr, self._mu)

    def _check_whole(self) -> None:
        if self._torn:
            raise DlcError("the outer state is torn: a step failed half-way; restore it from an image of another peer")


def _portable(vector: Tensor) -> memoryview:
    """The vector's own memory as little-endian bytes; a copy only on a big-endian host."""
    array = vector.numpy().astype("<f4", copy=False)
    return array.data.cast("B") if array.size else memoryview(b"")
