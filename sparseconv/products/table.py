"""The seven products as one table: what each multiplies, and which product each of its derivatives is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transposed = Literal["none", "first", "second", "result"]


@dataclass(frozen=True)
class Derivative:
    """A gradient as a product again: which one, and which of its matrices is read or written transposed."""

    product: str
    transposed: Transposed = "none"

    @property
    def row(self) -> Product:
        """The row of the product that it is."""
        return PRODUCTS[self.product]


@dataclass(frozen=True)
class Product:
    """One row: the dense product ``z = x o y`` and its two derivatives.

    ``grad1`` takes (y, dL/dz) and gives dL/dx; ``grad2`` takes (dL/dz, x) and gives dL/dy. The dense axes are written
    with one letter each; an axis that both inputs have and the output lacks is summed.
    """

    name: str
    axes1: str
    axes2: str
    axes_out: str
    grad1: Derivative
    grad2: Derivative


_ROWS = (
    Product("mul", "c", "c", "c", Derivative("mul"), Derivative("mul")),
    Product("outer", "a", "b", "ab", Derivative("vecmat", "second"), Derivative("mat_t_vec")),
    Product("inner", "c", "c", "", Derivative("vecsca"), Derivative("scavec")),
    Product("vecmat", "a", "ab", "b", Derivative("mat_t_vec", "first"), Derivative("outer", "result")),
    Product("vecsca", "c", "", "c", Derivative("scavec"), Derivative("inner")),
    Product("scavec", "", "c", "c", Derivative("inner"), Derivative("vecsca")),
    Product("mat_t_vec", "ab", "a", "b", Derivative("outer"), Derivative("vecmat", "second")),
)

#: the seven products by name
PRODUCTS: dict[str, Product] = {row.name: row for row in _ROWS}
