"""Pending copies: how they are made, and what others see meanwhile."""

import pytest
import torch
from torch import nn

from zerofix.kernels.pending import Pending, is_watched


def pending_copies(bucket, *gradients):
    """As DeepSpeed's hook adds them, with the bucket's slice shown in between."""
    pending, start = Pending(), 0
    for gradient in gradients:
        place = bucket.narrow(0, start, gradient.numel())
        pending.add(gradient.view(-1), place, gradient)
        gradient.data = place.view_as(gradient)
        pending.give_back()
        start += gradient.numel()
    return pending


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_keep_their_memory_until_their_copies_are_made(count):
    bucket = torch.full((6,), float("nan"))
    gradients = [torch.full((3, 1), i + 1.0) for i in range(count)]
    pending = pending_copies(bucket, *gradients)
    assert (len(pending), pending.bytes) == (count, 12 * count)
    assert [gradient[0].item() for gradient in gradients] == [1.0, 2.0][:count]
    gradients[0].mul_(5)
    assert bucket.isnan().all()
    pending.launch()
    assert bucket[: 3 * count].tolist() == [5, 5, 5, 2, 2, 2][: 3 * count]
    assert (len(pending), pending.bytes) == (0, 0)
    for gradient in gradients:
        assert gradient.shape == (3, 1)
        assert gradient.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()


def test_what_waits_counts_with_the_whole_memory_that_it_keeps():
    gradient = torch.zeros(100)[:3]
    assert pending_copies(torch.zeros(3), gradient).bytes == 400


@pytest.mark.parametrize("before", [0, 1], ids=["alone", "with-another"])
def test_a_failed_copy_is_not_tried_again(before):
    pending = pending_copies(torch.zeros(3), *[torch.ones(3)] * before)
    pending.add(torch.ones(1), torch.zeros(2, dtype=torch.int32)[::2].expand(3), torch.ones(1))
    with pytest.raises((ValueError, RuntimeError)):
        pending.launch()
    assert (len(pending), pending.bytes) == (0, 0)


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_may_belong_to_a_graph(count):
    gradients = [torch.randn(3, 4, requires_grad=True) * 2 for _ in range(count)]
    expected = torch.cat([gradient.detach().flatten() for gradient in gradients]).bfloat16()
    bucket = torch.zeros(count * 12, dtype=torch.bfloat16)
    pending = Pending()
    for i, gradient in enumerate(gradients):
        pending.add(gradient.view(-1), bucket[12 * i :][:12], gradient.detach())
    pending.launch()
    assert torch.equal(bucket, expected)
    assert not bucket.requires_grad


def test_register_hook_runs_before_the_gradient_is_there_and_does_not_count():
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    grads = []
    parameter.register_hook(lambda _: grads.append(parameter.grad))
    assert not is_watched(parameter)
    parameter.sum().backward()
    assert grads == [None]


def test_a_hook_that_was_removed_does_not_watch():
    parameter = nn.Parameter(torch.ones(2))
    assert not is_watched(parameter)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert is_watched(parameter)
    handle.remove()
    assert not is_watched(parameter)
