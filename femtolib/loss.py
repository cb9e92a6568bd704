"""The loss of language modelling, as a sum: who calls it divides by the tokens of the whole global batch."""

import torch
import torch.nn.functional as F

NOT_TRAINED = -100  # the label of a position that is not trained


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the trained positions of −log p(label).

    `logits` [batch, sequence, vocabulary], `labels` [batch, sequence]; NOT_TRAINED marks positions that do not count.
    In float32 at least: a bfloat16 log-softmax is off by half a percent.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_TRAINED, reduction="sum")
