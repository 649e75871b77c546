"""The learning rate: linear warm-up, then a cosine, over the share of all packs that is done.

Over the share and not over steps, so that a run that goes on with another number of workers keeps its place.
"""

from __future__ import annotations

import math

from ray_jobs.train.config import OptimConfig


def learning_rate(done: float, optim: OptimConfig) -> float:
    """The rate where `done` (0 to 1) of the run's packs are trained on.

    It rises from 0 to the peak over the first `warmup_share`, then falls to `final_lr_share` of the peak at 1. A step
    takes the rate of its own middle, so that neither the first nor the last step has rate 0.
    """
    if done < optim.warmup_share:
        return optim.lr * done / optim.warmup_share
    falling = (done - optim.warmup_share) / (1 - optim.warmup_share)
    return optim.lr * (optim.final_lr_share + (1 - optim.final_lr_share) * 0.5 * (1 + math.cos(math.pi * falling)))
