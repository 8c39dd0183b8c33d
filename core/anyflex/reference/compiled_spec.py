"""Prepared specs of the reference: evaluators of the graphs and of their derivative, made once."""

from __future__ import annotations

import functools

from anyflex.contract.spec import Spec
from anyflex.mod_graph.differentiate import Derivative, differentiate
from anyflex.mod_graph.evaluate import Evaluator
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.mkl_warmup import make_first_calls
from anyflex.mod_graph.simplify import simplify

__all__ = ["Prepared", "prepare"]


class Prepared:
    """Evaluators for one spec; immutable, so safe for many threads.

    Attributes:
        score: of the modified score, or None where the mod changes nothing or there is none.
        mask: of the mask function for PARTIAL blocks, or None.
        derivative: of the score mod, or None where `score` is.
        gradients: evaluator of the derivative: its score first if it has one, then for each
            scatter its value and its indices.
    """

    def __init__(self, spec: Spec) -> None:
        make_first_calls()  # of the softmax, where there is no graph
        self.score = _evaluator(spec.score_graph)
        self.mask = _evaluator(spec.mask_graph)
        self.derivative: Derivative | None = None
        self.gradients: Evaluator | None = None
        if self.score is not None and spec.score_graph is not None:
            wanted = [i for i, facts in enumerate(spec.captured) if facts.needs_grad]
            # Not simplified before differentiating: the derivative is that of the graph as
            # written.
            self.derivative = differentiate(spec.score_graph, wanted_captured=frozenset(wanted))
            self.gradients = Evaluator(self.derivative.nodes, self.derivative.roots)


@functools.lru_cache(maxsize=256)
def prepare(spec: Spec) -> Prepared:
    """Return the evaluators of `spec`, made once."""
    return Prepared(spec)


def _evaluator(graph: ModGraph | None) -> Evaluator | None:
    if graph is None:
        return None
    graph = simplify(graph)
    output = graph.nodes[graph.output]
    if output.operation == "input" and output.attribute == "score":
        return None
    return Evaluator(graph.nodes, (graph.output,))
