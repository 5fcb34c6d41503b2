"""A checkpoint's tensors as numbers, whatever they are stored in. In the converting environment only.

What is read here is read without the libraries that converted it: a mistake of theirs in packing, scales or
zero points shows as a difference to the base, instead of being undone by its own inverse.

Formats: compressed-tensors' `pack-quantized` and `float-quantized`, and AutoAWQ's `gemm`.
"""

from pathlib import Path
from typing import Any

from tasks.weights import tensors
from tasks.weights.recipes import Recipe, cut_experts

_VALUES_IN_INT32 = 8
_AUTOAWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of an integer holds the n-th value (AutoAWQ's WQLinear_GEMM)."""


class Checkpoint:
    """One folder of safetensors; files are mapped into memory, never loaded whole."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder = folder
        self.recipe = recipe
        self.stored = tensors.read(folder)
        self._files: dict[str, Any] = {}
        self._parts: dict[str, tuple[str, int, slice]] = {
            part: (name, index, rows)
            for name, tensor in self.stored.items()
            if len(tensor.shape) == 3
            for part, (index, rows) in cut_experts(name, tensor.shape).items()
        }

    def raw(self, name: str) -> Any:
        """The tensor as it is stored."""
        from safetensors import safe_open

        file = self.stored[name].file
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, "pt")
        return self._files[file].get_tensor(name)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Of an unquantized checkpoint: every matrix that its recipe quantizes, and its shape."""
        return {
            matrix: shape
            for name, tensor in self.stored.items()
            for matrix, shape in self.recipe.matrices(name, tensor.shape).items()
        }

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name, quantized or not."""
        module = name.removesuffix(".weight")
        packed = (f"{module}.weight_packed", f"{module}.qweight")
        return name in self.stored or name in self._parts or any(one in self.stored for one in packed)

    def values(self, name: str) -> Any:
        """The tensor in float32, with what quantization made of it multiplied out."""
        module = name.removesuffix(".weight")
        if f"{module}.weight_packed" in self.stored:
            return self._from_packed(module)
        if f"{module}.qweight" in self.stored:
            return self._from_autoawq(module)
        if name in self.stored:
            value = self.raw(name).float()
            scale = f"{module}.weight_scale"
            return value * _spread(self.raw(scale).float(), value.shape) if scale in self.stored else value
        owner, index, rows = self._parts[name]
        return self._slice(owner, index, rows).float()

    def _slice(self, owner: str, index: int, rows: slice) -> Any:
        from safetensors import safe_open

        with safe_open(self.folder / self.stored[owner].file, "pt") as file:
            return file.get_slice(owner)[index, rows.start : rows.stop]

    def _from_packed(self, module: str) -> Any:
        rows, columns = (int(size) for size in self.raw(f"{module}.weight_shape"))
        values = _nibbles(self.raw(f"{module}.weight_packed"))[:, :columns].float()
        scales = self.raw(f"{module}.weight_scale").float()
        zeros: Any = 8.0
        if f"{module}.weight_zero_point" in self.stored:
            packed = self.raw(f"{module}.weight_zero_point").t().contiguous()
            zeros = _nibbles(packed)[:, :rows].t().float().unsqueeze(-1)
        grouped = values.reshape(rows, scales.shape[1], -1)
        return ((grouped - zeros) * scales.unsqueeze(-1)).reshape(rows, columns)

    def _from_autoawq(self, module: str) -> Any:
        """Stored as [inputs, outputs / 8], with the outputs of one integer out of order."""
        values, zeros = (
            _nibbles(self.raw(f"{module}.{name}"), _AUTOAWQ_ORDER).float() for name in ("qweight", "qzeros")
        )
        scales = self.raw(f"{module}.scales").float()
        inputs, outputs = values.shape
        grouped = values.reshape(scales.shape[0], -1, outputs)
        return ((grouped - zeros.unsqueeze(1)) * scales.unsqueeze(1)).reshape(inputs, outputs).t()


def _nibbles(packed: Any, order: tuple[int, ...] = tuple(range(_VALUES_IN_INT32))) -> Any:
    """4-bit values of 32-bit integers along the last dimension; `order[n]` is where the n-th lies."""
    import torch

    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & 0xF).reshape(*packed.shape[:-1], -1)


def _spread(scale: Any, shape: Any) -> Any:
    """One scale for each row, or for each block of 128 by 128, as one for each value."""
    if scale.shape[-1] == 1 and scale.shape[0] == shape[0]:
        return scale
    block = 128
    return scale.repeat_interleave(block, 0)[: shape[0]].repeat_interleave(block, 1)[:, : shape[1]]
