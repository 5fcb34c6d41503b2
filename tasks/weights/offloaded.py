"""A model of which a part lies elsewhere (on the disk, in the host's memory) while it is converted. In the
converting environment only.

Keeps: of what lies there, one module at a time is in memory, whatever is done to the model; what comes out is the
same byte for byte as if all of it had been in memory.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLOAT32_BYTES = 4


def load(loader: Any, source: str, values: int, memory_bytes: int, folder: Path) -> Any:
    """The model in float32 with each expert as matrices of its own.

    Args:
        loader: the class of transformers that loads it.
        values: how many numbers it has.
        memory_bytes: how much of it may be in memory; the rest lies in `folder`.
    """
    import torch
    from compressed_tensors.offload import load_offloaded_model

    options: dict[str, Any] = {}
    if memory_bytes < _FLOAT32_BYTES * values:
        folder.mkdir(exist_ok=True)
        options = {
            "device_map": "auto",
            "max_memory": {"cpu": memory_bytes},
            "offload_folder": str(folder),
        }
    _restore_norms_where_they_are()
    with load_offloaded_model(loader):
        model = loader.from_pretrained(
            source, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **options
        )
    # After loading: to load them cut, transformers 5.17 looks into all its modules, and some need torchvision.
    _cut_experts(model)
    model._weight_conversions = [
        change
        for change in getattr(model, "_weight_conversions", None) or []
        if not any("experts" in target for target in change.target_patterns)
    ]
    return model


def _cut_experts(model: Any) -> None:
    """As llm-compressor's `linearize_moe`, which brings a layer's experts from the disk again for each of them,
    and leaves them there."""
    from compressed_tensors.offload import disable_offloading
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
    from llmcompressor.modeling.moe.linearize import get_non_linearized_moes

    for name, experts in get_non_linearized_moes(model):
        with disable_offloading():
            kind = LinearExperts2D.get_linear_experts_cls(experts.__class__)
            cut = kind.from_experts_module(experts, getattr(experts, "config", model.config))
        model.set_submodule(name, cut)
        if _is_on_disk(experts._parameters):
            for tensor in list(experts._parameters):
                _delete(experts._parameters, tensor)


def _delete(held: Any, name: str) -> None:
    """Also the file that transformers wrote where it stacked a checkpoint's experts: the cache only links to it."""
    link = Path(held.index[held.offloaded_values[name]]["safetensors_file"])
    file = link.resolve()
    del held[name]
    if file.parent == link.parent.resolve():
        file.unlink(missing_ok=True)


def _restore_norms_where_they_are() -> None:
    """llm-compressor 0.14.0.1 gives a norm that multiplies by 1 + weight back in a way that changes what the module
    shows, which is not what is kept where that lies on the disk or beside an accelerator."""
    import torch
    from llmcompressor.modeling.offset_norm import CalibrationOffsetNorm

    def restore(self: Any, original: Any) -> Any:
        weight = (self.weight.data.float() - 1.0).to(self._orig_dtype)
        original.weight = torch.nn.Parameter(weight, requires_grad=False)
        return original

    CalibrationOffsetNorm.restore = restore


@dataclass(frozen=True)
class Place:
    """Where one tensor of a model is held."""

    module: str
    name: str
    held: Any
    """The module's parameters or its buffers; on the disk where they are, and each access then reads it."""

    @property
    def full_name(self) -> str:
        """As in a checkpoint."""
        return f"{self.module}.{self.name}" if self.module else self.name

    def identity(self) -> int:
        """The same for places that share one tensor."""
        return id(_kept(self.held)[self.name])


class Tensors:
    """All tensors of a model, each once: a head may be the embedding."""

    def __init__(self, model: Any) -> None:
        self._sharing: dict[int, list[Place]] = defaultdict(list)
        for place in _places(model):
            self._sharing[place.identity()].append(place)

    def __iter__(self) -> Iterator[Place]:
        return iter([places[0] for places in self._sharing.values()])

    def replace(self, place: Place, right: Any) -> None:
        """Put another tensor there and wherever the old one is shared."""
        import torch

        if not _is_on_disk(place.held):
            # With an accelerator, what the module shows may be a copy of what is kept.
            kept = _kept(place.held)[place.name]
            kept.data = right.to(kept.device)
            return
        sharing = self._sharing[place.identity()]
        is_parameter = isinstance(place.held.offloaded_values[place.name], torch.nn.Parameter)
        del place.held[place.name]  # written over, it would keep its old type
        place.held[place.name] = torch.nn.Parameter(right, requires_grad=False) if is_parameter else right
        for other in sharing:
            other.held.offloaded_values[other.name] = place.held.offloaded_values[place.name]


def _places(model: Any) -> Iterator[Place]:
    for module_name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name in list(held):
                place = Place(module_name, name, held)
                if _kept(held)[name] is not None:
                    yield place


def _kept(held: Any) -> Any:
    """The tensors by name, where they are while no layer is at work."""
    from compressed_tensors.offload.cache import OffloadCache

    return held.offloaded_values if isinstance(held, OffloadCache) else held


def _is_on_disk(held: Any) -> bool:
    from compressed_tensors.offload.cache.disk import DiskCache

    return isinstance(held, DiskCache)
