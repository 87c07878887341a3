"""Making optimizers capturable, and keeping learning rates and skipped steps on the device while a step runs."""

from graphplan.optimizers.first_steps import within_first_steps as within_first_steps
from graphplan.optimizers.preparation import Preparation as Preparation
from graphplan.optimizers.preparation import check_optimizer as check_optimizer
from graphplan.optimizers.preparation import may_be_captured as may_be_captured
from graphplan.optimizers.preparation import prepare_optimizer as prepare_optimizer
from graphplan.optimizers.rates import LearningRates as LearningRates
from graphplan.optimizers.scaling import LENT as LENT
from graphplan.optimizers.scaling import ScaledSteps as ScaledSteps
