"""Pipeline parallelism: which layers run on which devices, in which order, and what it takes."""

from keras_het.planning.pipeline.partition import plan_pipeline, plan_with_cuts
from keras_het.planning.pipeline.plan import PipelinePlan, Stage, in_flight, routes, stage_order
from keras_het.planning.pipeline.problem import Devices, ModelProfile
from keras_het.planning.pipeline.simulation import Event, Timeline, simulate

__keras_het_stability__ = "experimental"
__all__ = [
    "Devices",
    "Event",
    "ModelProfile",
    "PipelinePlan",
    "Stage",
    "Timeline",
    "in_flight",
    "plan_pipeline",
    "plan_with_cuts",
    "routes",
    "simulate",
    "stage_order",
]
