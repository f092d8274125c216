"""Plans: the geometry of a convolution, found once."""

from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.explanation import Explanation
from sparseconv.plan.shared import shared_plan

__all__ = ["ConvolutionPlan", "Explanation", "shared_plan"]
