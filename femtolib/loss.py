"""The loss of language modelling, as a sum: who calls it divides by the tokens of the whole global batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

NOT_TRAINED = -100  # the label of a position that is not trained


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the trained positions of −log p(label).

    `logits` [batch, sequence, vocabulary], `labels` [batch, sequence]; NOT_TRAINED marks positions that do not count.
    In float32 at least: a bfloat16 log-softmax is off by half a percent. Logits whose vocabulary is cut over ranks
    (tensor parallelism) stay so: every rank gets the whole sum.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if isinstance(logits, DTensor):
        return _CutCrossEntropy.apply(logits.to_local(), labels, logits.device_mesh)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_TRAINED, reduction="sum")


class _CutCrossEntropy(torch.autograd.Function):
    """The same where each rank has logits [batch, sequence, vocabulary / tp]: the softmax's maximum and sum, and the
    label's logit, are found by two small reductions over the ranks (Shoeybi et al. 2019, arXiv:1909.08053)."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        group, width = mesh.get_group(), logits.shape[-1]
        largest = logits.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = (logits - largest).exp_()
        own = labels - mesh.get_local_rank() * width  # the label's place among this rank's logits
        is_own = (own >= 0) & (own < width)
        own = own.clamp(0, width - 1).unsqueeze(-1)
        at_label = (logits - largest).gather(-1, own).squeeze(-1).where(is_own, 0)
        sums = torch.stack((exponentials.sum(-1), at_label))
        dist.all_reduce(sums, group=group)
        total, at_label = sums
        trained = labels != NOT_TRAINED
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), own, is_own, trained)
        return (total.log() - at_label).where(trained, 0).sum()

    @staticmethod
    def backward(ctx, factor: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, own, is_own, trained = ctx.saved_tensors
        gradient = softmax.scatter_add(-1, own, -is_own.unsqueeze(-1).to(softmax.dtype))
        return gradient.mul_((factor * trained).unsqueeze(-1)), None, None
