"""Configuration files of NVIDIA's mig-parted (v1), as a layout.

    version: v1
    mig-configs:
      all-balanced:
        - devices: all
          device-filter: ["0x233510DE"]
          mig-enabled: true
          mig-devices: {"1g.18gb": 2, "3g.71gb": 1}

As there, an unknown field is refused. What is not: a GPU that two entries name (there the last one wins).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.errors import InputError
from tasks.gpu.inventory import Gpu, Inventory


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    devices: Literal["all"] | list[Annotated[int, Field(ge=0)]]
    mig_enabled: bool = Field(alias="mig-enabled")
    mig_devices: dict[str, Annotated[int, Field(ge=0)]] | None = Field(default=None, alias="mig-devices")
    device_filter: str | list[str] | None = Field(default=None, alias="device-filter")

    def matches(self, gpu: Gpu) -> bool:
        """Whether this entry is about `gpu`."""
        if self.devices != "all" and gpu.index not in self.devices:
            return False
        filters = [self.device_filter] if isinstance(self.device_filter, str) else self.device_filter or []
        return not filters or any(int(each, 16) == gpu.pci_device_id for each in filters)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal["v1"]
    mig_configs: dict[str, list[_Entry]] = Field(alias="mig-configs", min_length=1)


def counts(path: str, config: str, there: Inventory) -> dict[str, Mapping[str, int]]:
    """By UUID, for each GPU that the configuration cuts: profile name to number.

    Raises:
        InputError: the file cannot be read or is not of version v1, has no such configuration, or names a
            device that there is not.
    """
    entries = _entries(Path(path), config)
    found: dict[str, Mapping[str, int]] = {}
    for gpu in there.gpus:
        matching = [entry for entry in entries if entry.matches(gpu)]
        if len(matching) > 1:
            raise InputError(
                f"layout.config: {len(matching)} entries of {config!r} in {path} are about {gpu}; let each GPU be "
                f"in one"
            )
        if not matching or not matching[0].mig_enabled:
            continue
        wanted = {name: count for name, count in (matching[0].mig_devices or {}).items() if count}
        _refuse_shared(wanted, path, config)
        if wanted:
            found[gpu.uuid] = wanted
    named = {index for entry in entries if entry.devices != "all" for index in entry.devices}
    if missing := sorted(named - {gpu.index for gpu in there.gpus} - there.lost.keys()):
        raise InputError(
            f"layout.config: {config!r} in {path} names device {', '.join(map(str, missing))}, and this node has "
            f"{', '.join(str(gpu.index) for gpu in there.gpus) or 'none'}"
        )
    if not found:
        raise InputError(
            f"layout.config: {config!r} in {path} makes no MIG device on this node, so no worker"
        )
    return found


def _entries(path: Path, config: str) -> list[_Entry]:
    try:
        file = _File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"layout.mig_parted: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"layout.mig_parted: {path} is not YAML: {error}") from None
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise InputError(
            "\n".join([f"layout.mig_parted: {path} is no mig-parted configuration of version v1:", *lines])
        ) from None
    if config not in file.mig_configs:
        raise InputError(
            f"layout.config: {path} has no configuration {config!r}; it has {', '.join(file.mig_configs)}"
        )
    return file.mig_configs[config]


def _refuse_shared(wanted: Mapping[str, int], path: str, config: str) -> None:
    shared = [name for name in wanted if "c." in name]
    if shared:
        raise InputError(
            f"layout.config: {config!r} in {path} shares GPU instances between compute instances "
            f"({', '.join(shared)}): one worker would take the memory of another; use whole ones"
        )
