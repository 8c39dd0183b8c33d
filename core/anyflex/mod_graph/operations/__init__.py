"""The closed list of scalar operations that a mod graph may hold, one record each.

Everything a user may write (`anyflex.tracing.torch_functions`) is reduced to these. A backend
lowers a graph with one dictionary from these names to its target (`anyflex.mod_graph.lowering`); a
test proves that every such dictionary covers every name.
"""

from __future__ import annotations

from anyflex.mod_graph.operations.arithmetic import ARITHMETIC
from anyflex.mod_graph.operations.functions import FUNCTIONS, ROUNDING
from anyflex.mod_graph.operations.logic import BITWISE, COMPARISONS, STRUCTURE
from anyflex.mod_graph.operations.record import Operation

__all__ = ["OPERATIONS", "RECORDS"]

RECORDS: dict[str, Operation] = {
    record.name: record
    for record in (*ARITHMETIC, *BITWISE, *COMPARISONS, *ROUNDING, *FUNCTIONS, *STRUCTURE)
}
"""Operation name -> its record."""

OPERATIONS: dict[str, int | None] = {name: record.operands for name, record in RECORDS.items()}
"""Operation name -> number of arguments (None: any)."""
