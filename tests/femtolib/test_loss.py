"""The summed loss against a sum of logarithms in float64."""

import pytest
import torch
import torch.nn.functional as F

from femtolib.loss import NOT_TRAINED, summed_cross_entropy


def random_batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64).mul(4).to(dtype)  # [3, 5, 11]
    labels = torch.randint(0, 11, (3, 5), generator=generator)
    labels[0, 2:] = labels[2] = NOT_TRAINED
    return logits, labels


def reference(logits: torch.Tensor, labels: torch.Tensor) -> float:
    total = 0.0
    for row, row_labels in zip(logits.double().tolist(), labels.tolist(), strict=True):
        for scores, label in zip(row, row_labels, strict=True):
            if label != -100:
                total += torch.tensor(scores, dtype=torch.float64).exp().sum().log().item() - scores[label]
    return total


@pytest.mark.parametrize(
    ("dtype", "tolerance", "loss_dtype"),
    [
        (torch.float64, 1e-14, torch.float64),
        (torch.float32, 1e-6, torch.float32),
        (torch.bfloat16, 1e-6, torch.float32),  # of the bfloat16 logits: a bfloat16 log-softmax is 5e-3 off
    ],
)
def test_the_loss_is_the_sum_over_trained_positions(dtype, tolerance, loss_dtype):
    logits, labels = random_batch(dtype)
    loss = summed_cross_entropy(logits, labels)
    assert loss.dtype == loss_dtype and loss.shape == ()
    assert loss.item() == pytest.approx(reference(logits, labels), rel=tolerance)


def test_a_token_weighs_the_same_in_every_cut_of_the_batch():
    # torchtune#1875: averages of micro-batches averaged: 6.0 over 1 token and 18.0 over 9 are 2.4, not 4.0.
    logits, labels = random_batch(torch.float64)
    parts = sum(summed_cross_entropy(logits[i : i + 1], labels[i : i + 1]) for i in range(3))
    assert parts.item() == pytest.approx(summed_cross_entropy(logits, labels).item(), rel=1e-14)


def test_a_position_that_is_not_trained_gets_no_gradient_even_where_its_logits_are_extreme():
    logits, labels = random_batch(torch.float32)
    logits[0, 3] = 1e30
    logits.requires_grad_()
    summed_cross_entropy(logits, labels).backward()
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[labels == NOT_TRAINED].any()
    assert logits.grad[labels != NOT_TRAINED].abs().sum() > 0


def test_a_batch_without_a_trained_token_has_loss_zero_and_gradient_zero():
    # OLMo-core#657: 0/0 in the mean.
    logits, _ = random_batch(torch.float32)
    logits.requires_grad_()
    loss = summed_cross_entropy(logits, torch.full((3, 5), NOT_TRAINED))
    loss.backward()
    assert loss.item() == 0.0 and not logits.grad.any()


def test_the_gradient_is_that_of_torchs_loss_made_where_the_log_probabilities_lie():
    logits, labels = random_batch(torch.float64)
    theirs, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="sum")
    (0.3 * loss).backward()
    loss = summed_cross_entropy(ours, labels)
    (0.3 * loss).backward(retain_graph=True)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-14, atol=1e-16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(summed_cross_entropy(ours, labels), ours, create_graph=True)


def test_a_step_of_the_loss_holds_logits_and_their_gradient_and_no_more(peak_bytes):
    hidden, head = torch.randn(1, 64, 8, requires_grad=True), torch.randn(8, 5000)

    def step() -> None:
        logits = hidden @ head
        loss = summed_cross_entropy(logits, torch.zeros(1, 64, dtype=torch.long))
        del logits
        loss.backward()

    assert peak_bytes(step) < 2.1 * 64 * 5000 * 4


def test_a_label_beyond_the_vocabulary_is_an_error():
    logits, labels = random_batch(torch.float32)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        summed_cross_entropy(logits, labels.where(labels < 0, 11))
    with pytest.raises(AssertionError, match=r"logits \[3, 5, 11\] of labels \[3, 4\]"):
        summed_cross_entropy(logits, labels[:, :4])
