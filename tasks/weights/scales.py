"""By what awq multiplied each module's weight: noted while it converts, needed to measure what came out.

In the converting environments only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCALES = "scales"
"""A safetensors file beside the candidate's weights, never published: `MODULE.inputs` and `MODULE.outputs`,
by which the columns and rows of a module's weight were multiplied."""


class Noted:
    """Scales as they are found."""

    def __init__(self) -> None:
        self.modules: dict[str, dict[str, Any]] = {}

    def note(self, before: str, after: Sequence[str], scales: Any) -> None:
        """The columns of the modules `after` were multiplied by `scales`, the outputs of `before` divided."""
        for name in after:
            self._multiply(name, "inputs", scales)
        self._multiply(before, "outputs", 1 / scales)

    def save(self, path: Path) -> None:
        """Write them beside the weights."""
        from safetensors.torch import save_file

        found = {
            f"{name}.{side}": scales.contiguous()
            for name, sides in self.modules.items()
            for side, scales in sides.items()
        }
        save_file(found, path)

    def _multiply(self, name: str, side: str, scales: Any) -> None:
        sides = self.modules.setdefault(name, {})
        scales = scales.detach().float().cpu().clone()
        sides[side] = sides[side] * scales if side in sides else scales


class Scales:
    """Scales that were noted; none for a candidate that has no such file."""

    def __init__(self, path: Path | None, *, offset_norms: bool) -> None:
        from safetensors.torch import load_file

        self._found: Mapping[str, Any] = load_file(path) if path is not None and path.exists() else {}
        self._offset_norms = offset_norms

    def apply(self, name: str, value: Any) -> Any:
        """The base's tensor `name` as it should be in the candidate, before rounding."""
        module, _, kind = name.rpartition(".")
        rows, columns = self._found.get(f"{module}.outputs"), self._found.get(f"{module}.inputs")
        if kind == "weight" and columns is not None:
            value = value.float() * columns
        if rows is not None:
            if value.ndim == 1 and kind == "weight" and self._offset_norms:
                return (1 + value.float()) * rows - 1
            value = value.float() * (rows if value.ndim == 1 else rows.unsqueeze(-1))
        return value

    def touch(self, name: str) -> bool:
        """Whether the tensor was scaled."""
        module = name.rpartition(".")[0]
        return f"{module}.outputs" in self._found or (
            f"{module}.inputs" in self._found and name.endswith(".weight")
        )
