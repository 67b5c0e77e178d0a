"""Memory for vectors: what it is, and that none is handed out twice."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from dlc.comm import vectors
from dlc.comm.vectors import KEPT_BYTES_MAX, KEPT_MAX, LARGE_BYTES

LARGE = LARGE_BYTES // 4
makers = pytest.mark.parametrize("make", [vectors.empty, vectors.zeros, vectors.recycled])


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    vectors._kept.clear()
    yield
    vectors._kept.clear()


@makers
@pytest.mark.parametrize("numel", [0, 1, 1000, LARGE - 1, LARGE, LARGE + 7])
def test_a_vector_is_fp32_on_the_cpu_whatever_the_defaults(make: object, numel: int) -> None:
    assert callable(make)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            x = make(numel)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x.dtype, x.device.type, x.shape, x.is_contiguous()) == (torch.float32, "cpu", (numel,), True)
    assert not x.is_inference() and not x.requires_grad
    x.fill_(1.5)
    assert bool((x == 1.5).all())
    if make is vectors.zeros:
        assert not make(numel).any()


@makers
def test_large_ones_begin_with_a_cache_line(make: object) -> None:
    assert callable(make)
    assert [make(LARGE + i).data_ptr() % 64 for i in range(5)] == [0] * 5


def test_memory_is_recycled_once_nobody_refers_to_it() -> None:
    x = vectors.recycled(LARGE)
    place = x.data_ptr()
    assert vectors.recycled(LARGE).data_ptr() != place
    vectors._kept.clear()  # the second one's
    view, array = x[10:20], x.view(4, -1).numpy()
    del x
    assert vectors.recycled(LARGE).data_ptr() != place, "a view is left"
    vectors._kept.clear()
    del view
    assert vectors.recycled(LARGE).data_ptr() != place, "an array of numpy's is left"
    vectors._kept.clear()
    del array
    assert vectors.recycled(LARGE + 1).data_ptr() != place, "another length"
    assert vectors.recycled(LARGE).data_ptr() == place


def test_no_more_is_kept_than_is_said_and_nothing_too_large() -> None:
    many = [vectors.recycled(LARGE) for _ in range(KEPT_MAX + 3)]
    many.append(vectors.recycled(KEPT_BYTES_MAX // 4 + 1))
    del many
    assert len(vectors._kept) == KEPT_MAX
    assert all(memory.nbytes < LARGE_BYTES + 100 for memory in vectors._kept)


def test_threads_that_make_and_drop_vectors_never_share_one() -> None:
    """Each writes its own number all over, and finds it everywhere; some vectors end by the collector of cycles."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(60):
            x = vectors.recycled(LARGE)
            x.fill_(number)
            if turn % 3 == 0:
                cycle: list[object] = [x]
                cycle.append(cycle)
            if not bool((x == number).all()):
                wrong.append(number)
        gc.collect()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
