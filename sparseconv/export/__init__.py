"""Networks as programs that hold their geometry: for any process with sparseconv, or for C++ without Python."""

from sparseconv.export import operators as operators
from sparseconv.export import traced as traced
from sparseconv.export.card_package import package_for_card
from sparseconv.export.packaging import CPP, package
from sparseconv.export.program import export

__all__ = ["CPP", "export", "package", "package_for_card"]
