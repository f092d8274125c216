"""Networks as programs that hold their geometry: saved by torch.export, run wherever torch and sparseconv are."""

from sparseconv.export import operators as operators
from sparseconv.export import traced as traced
from sparseconv.export.program import export

__all__ = ["export"]
