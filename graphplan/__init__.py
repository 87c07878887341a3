"""Replay a whole PyTorch training step as one CUDA graph, and refuse steps whose replays would give other numbers."""

from typing import TYPE_CHECKING, Any

from graphplan.check.run import check_step as check_step
from graphplan.errors import BackendError as BackendError
from graphplan.errors import BusyError as BusyError
from graphplan.errors import CaptureError as CaptureError
from graphplan.errors import CaptureMemoryError as CaptureMemoryError
from graphplan.errors import CarryError as CarryError
from graphplan.errors import CheckMemoryError as CheckMemoryError
from graphplan.errors import ClosedError as ClosedError
from graphplan.errors import ControlFlowError as ControlFlowError
from graphplan.errors import CopyError as CopyError
from graphplan.errors import DeviceError as DeviceError
from graphplan.errors import DeviceFault as DeviceFault
from graphplan.errors import EffectError as EffectError
from graphplan.errors import FaultError as FaultError
from graphplan.errors import FeedError as FeedError
from graphplan.errors import GeneratorSeekError as GeneratorSeekError
from graphplan.errors import GradientError as GradientError
from graphplan.errors import GraphPlanError as GraphPlanError
from graphplan.errors import GuardError as GuardError
from graphplan.errors import HostEffectError as HostEffectError
from graphplan.errors import HostScalarError as HostScalarError
from graphplan.errors import HostSyncError as HostSyncError
from graphplan.errors import LearningRateError as LearningRateError
from graphplan.errors import MemoryBudgetError as MemoryBudgetError
from graphplan.errors import NotCapturedError as NotCapturedError
from graphplan.errors import OptimizerError as OptimizerError
from graphplan.errors import OptionError as OptionError
from graphplan.errors import OutcomeError as OutcomeError
from graphplan.errors import OutputError as OutputError
from graphplan.errors import OwnersError as OwnersError
from graphplan.errors import PaddingError as PaddingError
from graphplan.errors import PeerError as PeerError
from graphplan.errors import PolicyError as PolicyError
from graphplan.errors import RecaptureError as RecaptureError
from graphplan.errors import RefusalError as RefusalError
from graphplan.errors import SkipReason as SkipReason
from graphplan.errors import SlowerError as SlowerError
from graphplan.errors import SplitError as SplitError
from graphplan.errors import StaleError as StaleError
from graphplan.errors import SurroundingsError as SurroundingsError
from graphplan.errors import TemporaryCopyError as TemporaryCopyError
from graphplan.errors import UncoveredRoleError as UncoveredRoleError
from graphplan.errors import UnownedTensorError as UnownedTensorError
from graphplan.errors import VerifyError as VerifyError
from graphplan.inference.graphed_functions import Graphed as Graphed
from graphplan.inference.graphed_functions import Pool as Pool
from graphplan.inference.graphed_functions import graphed as graphed
from graphplan.inference.split_models import piecewise as piecewise
from graphplan.optimizers.preparation import prepare_optimizer as prepare_optimizer
from graphplan.plan.plan import Plan as Plan
from graphplan.program.program import Program as Program
from graphplan.report.stats import Stats as Stats
from graphplan.specs.policy import Policy as Policy
from graphplan.specs.roles import External as External
from graphplan.specs.roles import Role as Role
from graphplan.specs.roles import TensorSpec as TensorSpec
from graphplan.step import buckets as buckets
from graphplan.step.functional import capture as capture
from graphplan.step.functional import compile_cached as compile_cached
from graphplan.step.functional import compile_plan as compile_plan
from graphplan.step.graphed_step import GraphedStep as GraphedStep
from graphplan.step.graphed_step import graph_step as graph_step

if TYPE_CHECKING:
    from graphplan.callback.callback import GraphPlanCallback as GraphPlanCallback
    from graphplan.callback.transformers_trainer import GraphPlanTrainer as GraphPlanTrainer

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import Lightning or transformers only when a name that needs them is used. The core needs only torch."""
    if name == "GraphPlanCallback":
        from graphplan.environment.lightnings import installed_callback_class

        return installed_callback_class()
    if name == "GraphPlanTrainer":
        from graphplan.callback.transformers_trainer import GraphPlanTrainer

        return GraphPlanTrainer
    raise AttributeError(f"module 'graphplan' has no attribute {name!r}")
