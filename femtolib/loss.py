"""The loss of language modelling, as a sum: who calls it divides by the tokens of the whole global batch."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

NOT_TRAINED = -100  # the label of a position that is not trained


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the trained positions of −log p(label).

    `logits` [batch, sequence, vocabulary], `labels` [batch, sequence]; NOT_TRAINED marks positions that do not count.
    In float32 at least: a bfloat16 log-softmax is off by half a percent. Logits whose vocabulary is cut over ranks
    (tensor parallelism) stay so: every rank gets the whole sum. It has one backward pass and no second derivative.
    """
    assert logits.shape[:-1] == labels.shape, f"logits {[*logits.shape]} of labels {[*labels.shape]}"
    if logits.dtype != torch.float64:
        logits = logits.float()
    if isinstance(logits, DTensor):
        return _SummedCrossEntropy.apply(logits.to_local(), labels, logits.device_mesh)
    return _SummedCrossEntropy.apply(logits, labels, None)


class _SummedCrossEntropy(torch.autograd.Function):
    """torch's own keeps log-probabilities for the backward pass, and makes two more tensors of their size there. This
    one makes the gradient where they lie: logits are the largest tensors of a step. A second backward pass, and a
    second derivative, raise RuntimeError.

    Where each rank has logits [batch, sequence, vocabulary / tp], the maximum and sum of the softmax, and the label's
    logit, are found by two small reductions over the ranks (Shoeybi et al. 2019, arXiv:1909.08053).
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        trained = labels != NOT_TRAINED
        if mesh is None:
            is_own, own = trained, labels.where(trained, 0).unsqueeze(-1)
            log_probabilities = logits.log_softmax(-1)
            losses = -log_probabilities.gather(-1, own).squeeze(-1)
        else:
            group, width = mesh.get_group(), logits.shape[-1]
            own = labels - mesh.get_local_rank() * width  # the label's place among this rank's logits
            is_own = (own >= 0) & (own < width)
            own = own.clamp(0, width - 1).unsqueeze(-1)
            largest = logits.amax(-1, keepdim=True)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            log_probabilities = logits - largest
            at_label = log_probabilities.gather(-1, own).squeeze(-1).where(is_own, 0)
            sums = torch.stack((log_probabilities.exp().sum(-1), at_label))
            dist.all_reduce(sums, group=group)
            log_total, at_label = sums[0].log(), sums[1]
            log_probabilities -= log_total.unsqueeze(-1)
            losses = log_total - at_label
        ctx.save_for_backward(log_probabilities, own, is_own, trained)
        return losses.where(trained, 0).sum()

    @staticmethod
    def backward(ctx, factor: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():  # create_graph=True: what is done in place would be taken for a constant
            raise RuntimeError("summed_cross_entropy has no second derivative")
        log_probabilities, own, is_own, trained = ctx.saved_tensors
        gradient = log_probabilities.exp_()
        gradient.scatter_add_(-1, own, -is_own.unsqueeze(-1).to(gradient.dtype))
        return gradient.mul_((factor * trained).unsqueeze(-1)), None, None
