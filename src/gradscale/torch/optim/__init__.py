"""Optimizers that unscale, skip and step in one pass, with f32 master weights."""

from gradscale.torch.optim.adam import Adam, AdamW
from gradscale.torch.optim.lion import Lion
from gradscale.torch.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
