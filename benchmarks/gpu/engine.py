"""How vLLM 0.26 is set up on the GPU machine beyond what the pipeline does by itself: what is not carried is off."""

from collections.abc import Mapping
from typing import Any

FLAGS: dict[str, Any] = {"language-model-only": True, "gdn-prefill-backend": "triton"}
"""Text only; and the Triton kernels, because FlashInfer's are compiled at first use and need more than is there."""

ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
"""Optional kernels that are not carried."""


def arguments(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of the command line as arguments of `vllm.LLM`."""
    return {name.replace("-", "_"): value for name, value in flags.items()}
