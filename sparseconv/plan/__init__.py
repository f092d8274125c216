"""Plans: the geometry of a convolution, found once."""

from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.explain import Explanation
from sparseconv.plan.packed_weights import PackedWeights
from sparseconv.plan.plan_set import PlanSet
from sparseconv.plan.shared import shared_plan
from sparseconv.plan.within import plan_within

__all__ = ["ConvolutionPlan", "Explanation", "PackedWeights", "PlanSet", "plan_within", "shared_plan"]
