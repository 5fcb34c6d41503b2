"""Muon in float32: learns matrices in about half the steps that AdamW takes.

torch.optim.Muon computes in bf16, which takes eight times as long on a CPU without bf16 instructions (1.1 s
a step of the tiny model against 0.14 s). The numbers are those of torch.optim.Muon and of Keller Jordan's
description, https://kellerjordan.github.io/posts/muon/.
"""

from typing import Any

_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class Muon:
    """For matrices only; embeddings, norms and convolutions are another optimizer's."""

    def __init__(self, matrices: list[Any]) -> None:
        import torch

        self._matrices = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]

    def step(self, rate: float) -> None:
        """Move each matrix by `rate` along its gradient, made orthogonal."""
        import torch

        with torch.no_grad():
            for matrix, momentum in self._matrices:
                momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
                update = _orthogonal(matrix.grad.lerp(momentum, _MOMENTUM))
                rows, columns = matrix.shape
                matrix.sub_(update, alpha=rate * max(1.0, rows / columns) ** 0.5)


def _orthogonal(matrix: Any) -> Any:
    """The nearest matrix with singular values about 1, by Newton and Schulz's iteration."""
    if matrix.shape[0] > matrix.shape[1]:
        return _orthogonal(matrix.T).T
    a, b, c = _NEWTON_SCHULZ
    result = matrix / (matrix.norm() + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        square = result @ result.T
        result = a * result + (b * square + c * square @ square) @ result
    return result
