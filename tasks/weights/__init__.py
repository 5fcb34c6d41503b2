"""Weights: from a repository on the hub to a release that vLLM serves.

`pin` fixes what is open (commit, library versions), `download` fetches and proves every file, `convert` makes
the release in the converting environment. Downloads and releases are folders in one store, see `store`.
"""

from tasks.weights.tensors import check_group_size

__all__ = ["check_group_size"]
