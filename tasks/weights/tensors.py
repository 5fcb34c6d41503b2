"""What tensors a checkpoint holds, read from the headers of its safetensors files; no tensor is loaded.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, that many bytes of JSON
{name: {dtype, shape, data_offsets}}, then the data, without holes.
"""

import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tasks.errors import InputError, StageFailed
from tasks.weights import recipes

GROUP_SIZES = (128, 64, 32)
"""What a spec may ask for, best compressed first."""

_BLOCK = 128
"""Rows and columns of a block of fp8_block."""

_FOLLOWED = ("q_proj.weight", "k_proj.weight", "gate_proj.weight", "in_proj_qkv.weight")
"""Matrices that vLLM puts before others in one: it refuses blocks that lie in two of them (0.32)."""

_HEADER_LIMIT_BYTES = 100_000_000
"""As in the safetensors library: a longer one is not a header."""

_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16}
"""Of the types that checkpoints hold; all others that occur are 8 bits wide."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint."""

    file: str
    dtype: str
    """As safetensors calls it: BF16, F8_E4M3, I32, ..."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * _BITS.get(self.dtype, 8) // 8


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in `folder`, by name.

    Raises:
        StageFailed: a file is not safetensors, is truncated, or a tensor is in two of them.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _header(path).items():
            if name in tensors:
                raise StageFailed(
                    f"tensor {name} is in both {tensors[name].file} and {path.name} of {folder}"
                )
            tensors[name] = tensor
    return tensors


def check_index(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Check that the index, if there is one, says which file holds which tensor, and no more.

    Raises:
        StageFailed: it does not; the message names a tensor.
    """
    path = folder / "model.safetensors.index.json"
    files = {tensor.file for tensor in tensors.values()}
    if not path.exists():
        if len(files) > 1:
            raise StageFailed(f"{folder} holds {len(files)} safetensors files and no {path.name}")
        return
    try:
        mapped = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError):
        raise StageFailed(f"{path} is not an index: it has no weight_map") from None
    for name in sorted(mapped.keys() | tensors.keys()):
        held = tensors[name].file if name in tensors else "no file"
        if mapped.get(name) != held:
            raise StageFailed(f"{path} says that {name} is in {mapped.get(name)}, and {held} holds it")


def read_config(folder: Path) -> dict[str, object]:
    """The checkpoint's config.json.

    Raises:
        InputError: there is none, or it is not JSON: this repository is no model for transformers.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"model.repo: the repository has no readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise InputError("model.repo: the repository's config.json is not an object")
    return config


def check_group_size(folder: Path, group_size: int) -> None:
    """Check that every weight to be quantized in groups can be cut into whole groups.

    Args:
        folder: a downloaded checkpoint.
        group_size: weights along the input that share one scale.

    Raises:
        InputError: a layer's input size is not a multiple; names the layer and the sizes that work for all.
    """
    recipe = recipes.of(read_config(folder))
    inputs = {
        matrix: shape[1]
        for name, tensor in read(folder).items()
        for matrix, shape in recipe.matrices(name, tensor.shape).items()
    }
    misfit = {name: size for name, size in inputs.items() if size % group_size}
    if not misfit:
        return
    name, size = next(iter(misfit.items()))
    fitting = [str(other) for other in GROUP_SIZES if not any(size % other for size in inputs.values())]
    advice = (
        f"{' and '.join(fitting)} work{'s' if len(fitting) == 1 else ''}"
        if fitting
        else "no group size works"
    )
    raise InputError(
        f"convert.group_size: {group_size} does not divide the {size} inputs of "
        f"{name.removesuffix('.weight')} ({len(misfit)} of {len(inputs)} layers do not fit); for this "
        f"model {advice}" + ("" if fitting else ", take convert.scheme fp8 or none")
    )


def check_blocks(folder: Path) -> None:
    """Check that vLLM can fuse what is quantized in blocks of 128: it takes no block that lies in two matrices.

    Raises:
        InputError: a matrix that another follows in a fused one ends within a block; names it.
    """
    recipe = recipes.of(read_config(folder))
    for name, tensor in read(folder).items():
        for matrix, (rows, _) in recipe.matrices(name, tensor.shape).items():
            if matrix.endswith(_FOLLOWED) and rows % _BLOCK:
                raise InputError(
                    f"convert.scheme: fp8_block cuts matrices into blocks of {_BLOCK} x {_BLOCK}, and the {rows} "
                    f"rows of {matrix.removesuffix('.weight')} do not divide by that: no vLLM would load it; take fp8"
                )


def sequences(folder: str, texts: Sequence[str], tokens: int, length: int, named_by: str) -> list[list[int]]:
    """The texts as the checkpoint's tokenizer reads them, joined and cut into sequences of one length.

    Args:
        tokens: of all sequences together, at most.
        named_by: the field of the spec that names the texts.

    Raises:
        SystemExit: the texts are too short for one sequence.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = [number for text in texts for number in tokenizer.encode(text, add_special_tokens=False).ids]
    count = min(len(ids), tokens) // length
    if count == 0:
        sys.exit(f"{named_by}: the texts have {len(ids)} tokens; at least {length} are needed")
    return [ids[begin : begin + length] for begin in range(0, count * length, length)]


def _header(path: Path) -> dict[str, Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT_BYTES):
            raise StageFailed(f"{path} is not a safetensors file: its header cannot be {length} bytes long")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            tensors = {
                name: (Tensor(path.name, entry["dtype"], tuple(entry["shape"])), entry["data_offsets"])
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StageFailed(
                f"{path} is not a safetensors file: its header is not the JSON it should be"
            ) from None
    end = max((offsets[1] for _, offsets in tensors.values()), default=0)
    if 8 + length + end != size:
        raise StageFailed(f"{path} is {size} bytes long and its header speaks of {8 + length + end}")
    for name, (tensor, offsets) in tensors.items():
        if offsets[1] - offsets[0] != tensor.bytes:
            raise StageFailed(
                f"{path}: {name} should take {tensor.bytes} bytes and has {offsets[1] - offsets[0]}"
            )
    return {name: tensor for name, (tensor, _) in tensors.items()}
