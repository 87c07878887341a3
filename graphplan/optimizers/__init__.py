"""Making optimizers capturable, and keeping their learning rates in device memory while a step runs."""

from graphplan.optimizers.preparation import Preparation as Preparation
from graphplan.optimizers.preparation import check_optimizer as check_optimizer
from graphplan.optimizers.preparation import prepare_optimizer as prepare_optimizer
from graphplan.optimizers.rates import LearningRates as LearningRates
