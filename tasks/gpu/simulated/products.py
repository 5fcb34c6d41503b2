"""What the simulated products offer. Nothing but the simulator reads this: planning asks the driver.

Sources: NVIDIA's MIG user guide for names, placements and counts; the H200's profiles, placements, sizes and the
memory it keeps were read from hardware (driver 580.159.04, MIG off; benchmarks/results/2026-11-30-h200*).
Memory of H100 and A100-40 from the guide's usable sizes; A100-80 is taken to be as H100; SMs and memory of B200
are estimates.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GiProfile:
    """A GPU instance profile, as the driver describes it."""

    enum: int
    """By which NVML asks for it (NVML_GPU_INSTANCE_PROFILE_...)."""
    profile_id: int
    name: str
    slices: int
    """Compute slices."""
    most: int
    """How many a GPU can hold."""
    sms: int
    copy_engines: int
    memory_mb: int
    starts: tuple[int, ...]
    """Memory slices at which it may begin."""
    size: int
    """Memory slices."""


@dataclass(frozen=True)
class Product:
    """A GPU model."""

    name: str
    memory_mb: int
    pci_device_id: int
    sms: int
    resetless: bool
    """Whether MIG mode changes without a GPU reset: from Hopper on."""
    mode_survives_reboot: bool
    """Whether MIG mode does: on Ampere."""
    has_fabric: bool
    """Whether it registers with a fabric manager and tells how that went."""
    profiles: tuple[GiProfile, ...]
    reserved_bytes: int = 0
    """Of a whole GPU's memory, what the driver keeps for itself and shows as used; 0 where it was not read."""


def _profiles(names: str, memory_mb: tuple[int, ...], sms: tuple[int, ...]) -> tuple[GiProfile, ...]:
    """In the order 1g, 2g, 3g, 4g, 7g, 1g+me, 1g with double memory."""
    shape = (
        (0, 19, 1, 7, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        (1, 14, 2, 3, 2, (0, 2, 4), 2),
        (2, 9, 3, 2, 3, (0, 4), 4),
        (3, 5, 4, 1, 4, (0,), 4),
        (4, 0, 7, 1, 8, (0,), 8),
        (7, 20, 1, 1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
        (9, 15, 1, 4, 1, (0, 2, 4, 6), 2),
    )
    return tuple(
        GiProfile(enum, profile_id, f"MIG {name}", slices, most, units, engines, memory, starts, size)
        for (enum, profile_id, slices, most, engines, starts, size), name, memory, units in zip(
            shape, names.split(), memory_mb, sms, strict=True
        )
    )


_AMPERE_SMS = (14, 28, 42, 56, 98, 14, 14)
_HOPPER_SMS = (16, 32, 60, 64, 132, 16, 26)
_OF_80_GB = (9984, 20096, 40448, 40448, 81152, 9984, 20096)

PRODUCTS = {
    "a100-40": Product(
        *("NVIDIA A100-SXM4-40GB", 40960, 0x20B010DE, 108, False, True, False),
        _profiles(
            "1g.5gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb 1g.5gb+me 1g.10gb",
            (4864, 9856, 19968, 19968, 40192, 4864, 9856),
            _AMPERE_SMS,
        ),
    ),
    "a100-80": Product(
        *("NVIDIA A100-SXM4-80GB", 81920, 0x20B210DE, 108, False, True, False),
        _profiles("1g.10gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb 1g.10gb+me 1g.20gb", _OF_80_GB, _AMPERE_SMS),
    ),
    "h100-80": Product(
        *("NVIDIA H100 80GB HBM3", 81559, 0x233010DE, 132, True, False, True),
        _profiles("1g.10gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb 1g.10gb+me 1g.20gb", _OF_80_GB, _HOPPER_SMS),
    ),
    "h200-141": Product(
        *("NVIDIA H200", 143771, 0x233510DE, 132, True, False, True),
        _profiles(
            "1g.18gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb 1g.18gb+me 1g.35gb",
            (16384, 33280, 71424, 71424, 143360, 16384, 33280),
            _HOPPER_SMS,
        ),
        reserved_bytes=644_939_776,
    ),
    "b200-180": Product(
        *("NVIDIA B200", 183359, 0x290110DE, 148, True, False, True),
        _profiles(
            "1g.23gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb 1g.23gb+me 1g.45gb",
            (23040, 46080, 92160, 92160, 183296, 23040, 46080),
            (18, 36, 70, 72, 148, 18, 30),
        ),
    ),
}

CI_PROFILES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 7))
"""Compute instance profiles: NVML's enum, which is also the id, and the compute slices."""
