"""Declares the operators `torchvision::nms` and `torchvision::qnms` just before torchvision is imported.

torchvision's ordinary build registers fake kernels for them when it is imported, while its own compiled
library, which declares them, does not load beside a CPU build of torch: "operator torchvision::nms does
not exist". vLLM imports torchvision for Qwen3.5, even for text.

This module is imported at every start of the environment's Python (a .pth file), so it imports nothing
itself: torch costs seconds. It only waits for torchvision.
"""

import sys


class _BeforeTorchvision:
    """A meta path finder that finds torchvision as usual and declares the operators before it runs."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def declare_then_execute(module):
            _declare_operators()
            execute(module)

        spec.loader.exec_module = declare_then_execute
        return spec


_libraries = []  # the operators live as long as the Library that declared them


def _declare_operators():
    import torch

    if not _libraries:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


sys.meta_path.insert(0, _BeforeTorchvision)
