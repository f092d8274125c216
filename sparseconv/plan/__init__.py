"""Plans: the geometry of a convolution, found once."""

from sparseconv.plan.convolution import ConvolutionPlan
from sparseconv.plan.explanation import Explanation

__all__ = ["ConvolutionPlan", "Explanation"]
