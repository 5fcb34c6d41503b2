"""What stands behind the pointers of NVML: handles, and results that are written through references."""

import ctypes
from typing import Any

import pynvml

Thing = tuple[Any, ...]
"""("gpu", index), ("mig", gpu, gi, ci, uuid), ("gi", gpu, gi, made), ("ci", gpu, gi, ci) or ("events",)."""

_FIRST = 0x1000
_STEP = 0x10


class Refused(Exception):
    """A call that ends with an error of NVML."""

    def __init__(self, code: int) -> None:
        self.code = code


class Handles:
    """Numbers that look like pointers; valid from one nvmlInit to the last nvmlShutdown."""

    def __init__(self) -> None:
        self._things: list[Thing] = []
        self._numbers: dict[Thing, int] = {}
        self._generation = 0

    def forget(self) -> None:
        """After a shutdown. Old handles must not name new things, so numbers go on."""
        self._generation += len(self._things)
        self._things, self._numbers = [], {}

    def number(self, thing: Thing) -> int:
        """The handle of `thing`."""
        if thing not in self._numbers:
            self._numbers[thing] = _FIRST + _STEP * (self._generation + len(self._things))
            self._things.append(thing)
        return self._numbers[thing]

    def thing(self, handle: Any, *kinds: str) -> Thing:
        """What `handle` names.

        Raises:
            Refused: it is no handle of these kinds.
        """
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        place = (number - _FIRST) // _STEP - self._generation
        if not 0 <= place < len(self._things) or self._things[place][0] not in kinds:
            raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._things[place]

    def put(self, reference: Any, thing: Thing) -> None:
        """Write the handle of `thing` through `reference`."""
        set_pointer(referenced(reference), self.number(thing))


def referenced(reference: Any) -> Any:
    """The object behind byref().

    Raises:
        TypeError: it is the object itself, which crashes the process with the real library.
    """
    if not hasattr(reference, "_obj"):
        raise TypeError(f"the C library wants a pointer and got {type(reference).__name__}: pass byref(...)")
    return reference._obj


def put(reference: Any, value: Any) -> None:
    """Write a number through `reference`."""
    referenced(reference).value = value


def set_pointer(pointer: Any, number: int) -> None:
    """Let a ctypes pointer, or one in an array, point to `number`."""
    ctypes.c_void_p.from_buffer(pointer).value = number


def number_of(value: Any) -> int:
    """An argument that is an int or a ctypes number."""
    return int(getattr(value, "value", value))
