"""Supervised training: models, augmentation, the one loop, evaluation, personalisation."""

from fedgist.train.augment import POLICIES, Policy, augment
from fedgist.train.evaluate import Score, evaluate
from fedgist.train.loop import finetune, split, train
from fedgist.train.models import MODELS, build_model
from fedgist.train.network import Network
from fedgist.train.personal import Personal, personalise
from fedgist.train.recipe import Recipe
from fedgist.train.restarts import train_converged

__all__ = [
    "MODELS",
    "POLICIES",
    "Network",
    "Personal",
    "Policy",
    "Recipe",
    "Score",
    "augment",
    "build_model",
    "evaluate",
    "finetune",
    "personalise",
    "split",
    "train",
    "train_converged",
]
