"""Prove that a converted checkpoint has the structure that was asked for, before anybody can see it.

The base is the downloaded checkpoint. Every tensor of it must be in the release, either quantized as the
scheme says or as it was; nothing else may be there. Numbers are not looked at here: see `gate`.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from tasks.errors import StageFailed
from tasks.weights import tensors
from tasks.weights.recipes import Recipe
from tasks.weights.store import DOWNLOAD_MANIFEST, MANIFEST, Manifest
from tasks.weights.tensors import Tensor

Expected = Mapping[str, tuple[frozenset[str], tuple[int, ...]]]
"""Tensor name to the types it may have and its shape."""

_FORMATS = {
    "fp8": ("compressed-tensors", "float-quantized"),
    "fp8_block": ("compressed-tensors", "float-quantized"),
    "awq": ("compressed-tensors", "pack-quantized"),
    "autoawq": ("awq", None),
}
"""quant_method and format in config.json, by scheme; `autoawq` is awq by the converter of that name."""

_SCALES = frozenset({"BF16", "F16", "F32"})

_BLOCK = 128
"""Rows and columns of one block of fp8_block."""

_HEADER_BYTES, _HEADER_BYTES_OF_A_TENSOR = 4096, 512
"""Of a safetensors file, at most."""

_VALUES_IN_INT32 = 8
"""4-bit values in one packed integer."""


def verify(base: Path, release: Path, scheme: str, group_size: int, symmetric: bool, recipe: Recipe) -> None:
    """Check the structure of a release that is not published yet.

    Raises:
        StageFailed: names the first tensor or setting that is not as it must be.
    """
    found = tensors.read(release)
    tensors.check_index(release, found)
    _check_config(base, release, scheme)
    expected: dict[str, tuple[frozenset[str], tuple[int, ...]]] = {}
    for name, tensor in tensors.read(base).items():
        matrices = recipe.matrices(name, tensor.shape)
        for matrix, shape in matrices.items():
            expected |= _quantized(matrix, shape, scheme, group_size, symmetric)
        if not matrices:
            expected[name] = frozenset({tensor.dtype}), tensor.shape
    _compare(found, expected)
    _check_sizes(release, found)


def verify_carried_over(base: Manifest, release: Manifest) -> None:
    """Check that tokenizer, chat template and all else that is not converted is byte-equal to the base.

    Raises:
        StageFailed: names the file.
    """
    for name, file in base.files.items():
        if not is_converted(name) and release.files.get(name) != file:
            raise StageFailed(f"{name} of the release is not the repository's: converting must not touch it")


def is_converted(name: str) -> bool:
    """Whether a file of the base is made anew by converting, rather than carried over.

    A `manifest.json` of the repository's gives way to the release's own.
    """
    made = ("config.json", "model.safetensors.index.json", DOWNLOAD_MANIFEST, MANIFEST)
    return name in made or name.endswith(".safetensors")


def _quantized(name: str, shape: tuple[int, int], scheme: str, group_size: int, symmetric: bool) -> Expected:
    """What stands for a quantized matrix of that name, in compressed-tensors' terms."""
    rows, columns = shape
    module = name.removesuffix("weight")
    if scheme == "autoawq":  # transposed: inputs first
        packed, halves = frozenset({"I32"}), frozenset({"F16"})
        return {
            f"{module}qweight": (packed, (columns, rows // _VALUES_IN_INT32)),
            f"{module}qzeros": (packed, (columns // group_size, rows // _VALUES_IN_INT32)),
            f"{module}scales": (halves, (columns // group_size, rows)),
        }
    if scheme == "awq":
        groups = columns // group_size
        zero_points = (frozenset({"I32"}), (math.ceil(rows / _VALUES_IN_INT32), groups))
        return {
            f"{module}weight_packed": (frozenset({"I32"}), (rows, math.ceil(columns / _VALUES_IN_INT32))),
            f"{module}weight_scale": (_SCALES, (rows, groups)),
            f"{module}weight_shape": (frozenset({"I64", "I32"}), (2,)),
        } | ({} if symmetric else {f"{module}weight_zero_point": zero_points})
    scales = (math.ceil(rows / _BLOCK), math.ceil(columns / _BLOCK)) if scheme == "fp8_block" else (rows, 1)
    return {name: (frozenset({"F8_E4M3"}), (rows, columns)), f"{module}weight_scale": (_SCALES, scales)}


def _compare(found: Mapping[str, Tensor], expected: Expected) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise StageFailed(f"the converted checkpoint lacks {name}: a layer was lost or left unquantized")
        if name not in expected:
            raise StageFailed(
                f"the converted checkpoint holds {name}, which nothing asked for: it should be as it was"
            )
        types, shape = expected[name]
        if found[name].dtype not in types or found[name].shape != shape:
            raise StageFailed(
                f"{name} of the converted checkpoint is {found[name].dtype} {list(found[name].shape)} and "
                f"should be {' or '.join(sorted(types))} {list(shape)}"
            )


def _check_sizes(release: Path, found: Mapping[str, Tensor]) -> None:
    """A file is its tensors and a header: with the shapes and types right, more would be bytes nobody asked for."""
    for file in sorted({tensor.file for tensor in found.values()}):
        size = (release / file).stat().st_size
        held = [tensor.bytes for tensor in found.values() if tensor.file == file]
        if size > sum(held) + _HEADER_BYTES + _HEADER_BYTES_OF_A_TENSOR * len(held):
            raise StageFailed(
                f"{file} of the converted checkpoint is {size} bytes long for {sum(held)} of tensors"
            )


def _check_config(base: Path, release: Path, scheme: str) -> None:
    config = tensors.read_config(release)
    quantization = config.pop("quantization_config", None)
    if not isinstance(quantization, dict):
        raise StageFailed(
            "config.json of the converted checkpoint has no quantization_config: no engine could load it"
        )
    said = quantization.get("quant_method"), quantization.get("format")
    if said != _FORMATS[scheme]:
        raise StageFailed(
            f"config.json of the converted checkpoint says {said[0]} {said[1]} and should say "
            f"{_FORMATS[scheme][0]} {_FORMATS[scheme][1]}"
        )
    if config != tensors.read_config(base):
        raise StageFailed(
            "config.json of the converted checkpoint differs from the repository's in more than that"
        )
