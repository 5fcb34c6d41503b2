"""Prove that a converted checkpoint has the structure that was asked for, before anybody can see it.

The base is the downloaded checkpoint. Every tensor of it must be in the release, either quantized as the
scheme says or as it was; nothing else may be there. Numbers are not looked at here.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from tasks.errors import StageFailed
from tasks.weights import tensors
from tasks.weights.recipes import Recipe
from tasks.weights.store import DOWNLOAD_MANIFEST, Manifest
from tasks.weights.tensors import Tensor

Expected = Mapping[str, tuple[frozenset[str], tuple[int, ...]]]
"""Tensor name to the types it may have and its shape."""

_FORMATS = {"fp8": "float-quantized", "fp8_block": "float-quantized", "awq": "pack-quantized"}

_SCALES = frozenset({"BF16", "F16", "F32"})

_BLOCK = 128
"""Rows and columns of one block of fp8_block."""

_VALUES_IN_INT32 = 8
"""4-bit values in one packed integer."""


def verify(base: Path, release: Path, scheme: str, group_size: int, recipe: Recipe) -> None:
    """Check the structure of a release that is not published yet.

    Raises:
        StageFailed: names the first tensor or setting that is not as it must be.
    """
    found = tensors.read(release)
    tensors.check_index(release, found)
    _check_config(base, release, scheme)
    expected: dict[str, tuple[frozenset[str], tuple[int, ...]]] = {}
    for name, tensor in tensors.read(base).items():
        if recipe.quantizes(name, tensor.shape):
            expected |= _quantized(name, tensor, scheme, group_size)
        else:
            expected[name] = frozenset({tensor.dtype}), tensor.shape
    _compare(found, expected)


def verify_carried_over(base: Manifest, release: Manifest) -> None:
    """Check that tokenizer, chat template and all else that is not converted is byte-equal to the base.

    Raises:
        StageFailed: names the file.
    """
    for name, file in base.files.items():
        if not is_converted(name) and release.files.get(name) != file:
            raise StageFailed(f"{name} of the release is not the repository's: converting must not touch it")


def is_converted(name: str) -> bool:
    """Whether a file of the base is made anew by converting, rather than carried over."""
    return name in ("config.json", "model.safetensors.index.json", DOWNLOAD_MANIFEST) or name.endswith(
        ".safetensors"
    )


def _quantized(name: str, tensor: Tensor, scheme: str, group_size: int) -> Expected:
    """What stands for a quantized matrix of that name, in compressed-tensors' terms."""
    rows, columns = tensor.shape
    module = name.removesuffix("weight")
    if scheme == "awq":
        groups = columns // group_size
        return {
            f"{module}weight_packed": (frozenset({"I32"}), (rows, math.ceil(columns / _VALUES_IN_INT32))),
            f"{module}weight_scale": (_SCALES, (rows, groups)),
            f"{module}weight_zero_point": (frozenset({"I32"}), (math.ceil(rows / _VALUES_IN_INT32), groups)),
            f"{module}weight_shape": (frozenset({"I64", "I32"}), (2,)),
        }
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


def _check_config(base: Path, release: Path, scheme: str) -> None:
    config = tensors.read_config(release)
    quantization = config.pop("quantization_config", None)
    if not isinstance(quantization, dict):
        raise StageFailed(
            "config.json of the converted checkpoint has no quantization_config: no engine could load it"
        )
    if (
        quantization.get("quant_method") != "compressed-tensors"
        or quantization.get("format") != _FORMATS[scheme]
    ):
        raise StageFailed(
            f"config.json of the converted checkpoint says {quantization.get('quant_method')} "
            f"{quantization.get('format')} and should say compressed-tensors {_FORMATS[scheme]}"
        )
    if config != tensors.read_config(base):
        raise StageFailed(
            "config.json of the converted checkpoint differs from the repository's in more than that"
        )
