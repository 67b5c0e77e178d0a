from collections.abc import Callable

import pytest
import torch
from torch import nn

from dlc.errors import UsageError
from dlc.flat import UNKNOWN_LAYOUT, FlatView, Layout, device_of, flatten_tensors, unflatten_into


def mixed() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [
        torch.randn(3, 5, generator=g),
        torch.randn((), generator=g),
        torch.randn(7, generator=g).bfloat16(),
        torch.empty(0, 4),
        torch.randn(4, 6, generator=g).half().t(),  # not contiguous
    ]


def test_flatten_and_back_keeps_every_bit() -> None:
    tensors = mixed()
    flat = flatten_tensors(tensors)
    assert flat.dtype == torch.float32 and flat.shape == (15 + 1 + 7 + 24,)
    assert torch.equal(flat[-24:], tensors[-1].float().reshape(-1))
    targets = [torch.zeros_like(t) for t in tensors]
    unflatten_into(flat, targets)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target, tensor)


def test_scatter_rounds_to_the_dtype() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    FlatView([p]).scatter(torch.tensor([1.001]))
    assert p.item() == torch.tensor(1.001).bfloat16().item() != pytest.approx(1.001, abs=1e-6)
    assert p.requires_grad


def test_tied_weights_count_once_and_frozen_ones_not() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    assert FlatView(model.parameters()).numel == 40 + 16
    assert FlatView([*model[0].parameters(), *model[2].parameters()]).numel == 40
    twin = nn.Parameter(model[0].weight.data)  # another Parameter over the same memory
    assert FlatView([model[0].weight, twin]).numel == 40


@pytest.mark.parametrize(
    "another", [lambda w: w.t(), lambda w: w.view(-1), lambda w: w[1:], lambda w: w.view(2, -1)], ids="tvsr"
)
def test_the_same_memory_in_another_form_is_refused(another: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each was rounded by itself: with topk the two had parted by more than half of their size after four rounds."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    model[1].weight = nn.Parameter(another(model[0].weight.data))
    with pytest.raises(UsageError, match=r"0\.weight and 1\.weight|1\.weight and 0\.weight"):
        FlatView.of(model)


def test_parts_of_one_memory_that_do_not_meet_are_parameters_of_their_own() -> None:
    """As cuDNN keeps those of an LSTM, or a model the heads of one projection."""
    memory = torch.zeros(6, 8)
    rows, columns = memory[:4], memory[4:]
    assert FlatView([nn.Parameter(rows), nn.Parameter(columns)]).numel == 48
    assert FlatView([nn.Parameter(memory[:, :3]), nn.Parameter(memory[:, 3:])]).numel == 48


def test_gather_into_the_given_vector_and_scatter() -> None:
    model = nn.Linear(3, 2)
    view = FlatView.of(model)
    out = torch.empty(view.numel)
    assert view.gather(out) is out
    assert torch.equal(out, torch.cat([model.weight.detach().reshape(-1), model.bias.detach()]))
    view.scatter(torch.arange(8.0))
    assert model.bias.tolist() == [6.0, 7.0]


@pytest.mark.parametrize("bad", [torch.empty(9), torch.empty(8).double(), torch.empty(2, 4), torch.empty(16)[::2]])
def test_wrong_vectors_are_refused(bad: torch.Tensor) -> None:
    view = FlatView.of(nn.Linear(3, 2))
    for use in (view.gather, view.scatter):
        with pytest.raises(UsageError):
            use(bad)


def test_what_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="float64"):
        FlatView([nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    with pytest.raises(UsageError, match="no trainable"):
        FlatView([])


def test_the_layout_tells_other_models_of_as_many_elements_apart() -> None:
    def layout(names: list[str] | None, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Layout:
        return FlatView([nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes], names).fingerprint()

    base = layout(["a.w", "b"], (2, 3), (6,))
    for same in (
        layout(["a.w", "b"], (2, 3), (6,)),
        layout(["a.w", "b"], (2, 3), (6,), dtype=torch.bfloat16),
        layout(["module.a.w", "module.b"], (2, 3), (6,)),
        layout(["_orig_mod.a._orig_mod.w", "b"], (2, 3), (6,)),
        layout(["net.inner.a.w", "net.inner.b"], (2, 3), (6,)),
        layout(None, (2, 3), (6,)),
        UNKNOWN_LAYOUT,
    ):
        assert not base.differs(same) and not same.differs(base)
    for other in (layout(["a.w", "b"], (3, 2), (6,)), layout(None, (6,), (2, 3)), layout(["b", "a.w"], (6,), (2, 3))):
        assert base.differs(other) == other.differs(base) == "in other shapes"
    for other in (layout(["a.w", "c"], (2, 3), (6,)), layout(["b", "a.w"], (2, 3), (6,))):
        assert base.differs(other) == other.differs(base) == "of other names, or in another order"
    with pytest.raises(UsageError):
        layout(["a"], (2,), (3,))


@pytest.mark.gpu
def test_cuda_parameters() -> None:
    tensors = [t.cuda() for t in mixed()]
    flat = flatten_tensors(tensors)
    assert flat.device.type == "cpu" and torch.equal(flat, flatten_tensors(mixed()))
    unflatten_into(flat * 2, tensors)
    assert torch.equal(flatten_tensors(tensors), flat * 2)


def test_buffers_are_no_part_of_the_vector() -> None:
    """Statistics such as BatchNorm's stay what each peer made of them."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    view = FlatView.of(model)
    assert view.numel == sum(p.numel() for p in model.parameters())
    model(torch.randn(8, 3))
    statistics = model[1].running_mean.clone()
    assert statistics.any()
    view.scatter(torch.zeros(view.numel))
    assert torch.equal(model[1].running_mean, statistics) and not model[1].weight.any()


def test_the_layout_names_what_stands_in_the_vector() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)).to(torch.bfloat16)
    model[0].bias.requires_grad_(False)
    assert FlatView.of(model).layout() == {"0.weight": "bfloat16 2x3", "1.weight": "bfloat16 2x2"}


def test_only_a_cuda_device_that_holds_all_is_where_tensors_are_put_together() -> None:
    cpu, elsewhere = torch.empty(2), torch.empty(2, device="meta")
    assert device_of([cpu, cpu]) == device_of([cpu, elsewhere]) == device_of([elsewhere]) == torch.device("cpu")


@pytest.mark.parametrize("elems", [1, 3, 4, 7, 100])
def test_parts_one_after_the_other_are_the_vector(elems: int) -> None:
    tensors = [torch.randn(2, 3), torch.randn(4).bfloat16(), torch.randn(5, 2).t(), torch.randn(1).half()]
    view = FlatView(tensors)
    whole, at = view.gather(torch.empty(view.numel)), 0
    for part in view.parts(elems):
        assert part.numel() == min(elems, view.numel - at)
        assert torch.equal(part, whole[at : at + part.numel()])
        part.fill_(9.0)  # it is no view of the parameters
        at += part.numel()
    assert at == view.numel and torch.equal(view.gather(torch.empty(at)), whole)
