"""The configuration: one frozen tree, unknown keys refused, built once at the edge.

`CampaignConfig` is the whole; each component receives its own part. Defaults live on the fields and nowhere
else. The tree renders as a form in the Prefect UI, so every field has a title-worthy name and a description,
closed sets are enums, and alternatives are unions told apart by `kind`. `nereus.config.load` builds it from a
file.
"""

from nereus.config.adaptation import AdaptationConfig, TransitionsConfig
from nereus.config.algorithm import (
    AdaptiveKl,
    Aggregation,
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    KlConfig,
    KlEstimator,
    PpoConfig,
    ReinforcePpConfig,
    RemaxConfig,
    RlooConfig,
)
from nereus.config.asynchrony import AsynchronyConfig
from nereus.config.campaign import CampaignConfig, CheckpointConfig, Tracking
from nereus.config.correction import CorrectionConfig, RejectionConfig
from nereus.config.dashboard import DashboardConfig
from nereus.config.engines import EnginesConfig
from nereus.config.environment import environment_folder
from nereus.config.evaluation import EvaluationConfig
from nereus.config.logging import LoggerKind
from nereus.config.models import LoraConfig, LoraTarget, ModelsConfig, Precision
from nereus.config.plan import ClusterConfig, PlanChange, PlanConfig, StagePlan
from nereus.config.prompts import FileData, LongPrompts, PromptsConfig, PythonData, ReasoningGymData
from nereus.config.reward import CodeReward, JudgeReward, ModelReward, PythonReward, ReasoningGymReward
from nereus.config.tools import ToolsConfig
from nereus.config.training import BatchConfig, OptimizerConfig, SamplingConfig

__all__ = [
    "AdaptationConfig",
    "AdaptiveKl",
    "Aggregation",
    "AsynchronyConfig",
    "BatchConfig",
    "CampaignConfig",
    "CheckpointConfig",
    "CispoConfig",
    "ClusterConfig",
    "CodeReward",
    "CorrectionConfig",
    "DapoConfig",
    "DashboardConfig",
    "DrGrpoConfig",
    "EnginesConfig",
    "EvaluationConfig",
    "FileData",
    "GrpoConfig",
    "GspoConfig",
    "JudgeReward",
    "KlConfig",
    "KlEstimator",
    "LoggerKind",
    "LongPrompts",
    "LoraConfig",
    "LoraTarget",
    "ModelReward",
    "ModelsConfig",
    "OptimizerConfig",
    "PlanChange",
    "PlanConfig",
    "PpoConfig",
    "Precision",
    "PromptsConfig",
    "PythonData",
    "PythonReward",
    "ReasoningGymData",
    "ReasoningGymReward",
    "ReinforcePpConfig",
    "RejectionConfig",
    "RemaxConfig",
    "RlooConfig",
    "SamplingConfig",
    "StagePlan",
    "ToolsConfig",
    "Tracking",
    "TransitionsConfig",
    "environment_folder",
]
