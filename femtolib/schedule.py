"""The learning rate as a function of the step alone: nothing to advance, nothing to save, the same on any layout."""

import math


def learning_rate(
    update: int,
    *,
    total: int,
    lr: float,
    name: str,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """Learning rate of update k = `update` (from 0) in a run of `total` updates.

    The warmup gives lr·(k+1)/warmup. After it the progress is p = (k − warmup)/(total − warmup), and the rate goes from
    lr to lr·min_lr_ratio along half a cosine or a line, or stays (constant). wsd (warmup, stable, decay: Hu et al.
    2024, arXiv:2404.06395) stays, then falls in a line over the last `decay_steps` updates.
    """
    if update < warmup_steps:
        return lr * (update + 1) / warmup_steps
    decay_start = max(warmup_steps, total - decay_steps) if name == "wsd" else warmup_steps
    if name == "constant" or update < decay_start:
        return lr
    progress = (update - decay_start) / max(1, total - decay_start)
    height = (1 + math.cos(math.pi * progress)) / 2 if name == "cosine" else 1 - progress
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * height)


def scale_learning_rate(lr: float, batch_size: int, reference: int | None) -> float:
    """The learning rate for `batch_size` rows a step, of one found for `reference` rows (None: it is for these).

    The linear scaling rule: k times the rows, k times the rate (Goyal et al. 2017, arXiv:1706.02677, section 2.1). It
    was found for SGD and wants a warmup; for Adam the square root of k is often proposed instead (Malladi et al. 2022,
    arXiv:2205.10287).
    """
    return lr if reference is None else lr * batch_size / reference
