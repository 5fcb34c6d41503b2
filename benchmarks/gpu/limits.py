"""The card's two ceilings as this machine gives them: bytes moved by a copy, operations of a matrix product."""

from collections.abc import Callable
from typing import Any


def measure() -> dict[str, Any]:
    """Medians over repeats on random data, after a warm-up. Needs torch with CUDA."""
    import torch

    size = 2**32
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source))
    edge = 8192
    left, right = (torch.randn(edge, edge, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = _median_s(lambda: torch.mm(left, right))
    eight = left.to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones(1, device="cuda")
    eight_s = _median_s(
        lambda: torch._scaled_mm(
            *eight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )
    operations = 2 * edge**3
    return {
        "copy_bytes_per_s": 2 * size / copy_s,
        "bfloat16_operations_per_s": operations / product_s,
        "fp8_operations_per_s": operations / eight_s,
    }


def _median_s(work: Callable[[], Any], repeats: int = 30) -> float:
    import torch

    for _ in range(5):
        work()
    times = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return float(sorted(times)[repeats // 2])
