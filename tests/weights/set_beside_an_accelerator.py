"""In the converting environment: what is replaced in modules whose tensors are seen as copies.

On a machine with an accelerator a layer's tensors lie in the host's memory, and whoever asks for one gets a copy
on the accelerator. Here the copy is made on the CPU.
"""

import sys

from tasks.weights import offloaded


def main() -> None:
    import torch
    from compressed_tensors.offload import offload_module
    from compressed_tensors.offload.cache import CPUCache

    CPUCache.onload = lambda self, offloaded: None if offloaded is None else offloaded.clone()
    head, embedding = (torch.nn.Linear(2, 3, bias=False) for _ in range(2))
    embedding.weight = head.weight
    for module in (head, embedding):
        offload_module(module, torch.device("cpu"), torch.device("cpu"))
    right = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
    tensors = offloaded.Tensors(torch.nn.ModuleList([head, embedding]))
    (place,) = tensors
    tensors.replace(place, right)
    for module in (head, embedding):
        if module.weight.dtype != torch.bfloat16 or not torch.equal(module.weight, right):
            sys.exit(f"{module.weight} is kept, and should be {right}")


if __name__ == "__main__":
    main()
