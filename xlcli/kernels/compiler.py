"""Numba, which all kernels import from here: else it reads `.numba_config.yaml` of the working folder.

It looks for that file when it is imported and before it compiles, and reads it if it has PyYAML. A program that has
imported Numba before keeps its settings.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

modules: dict[str, Any] = sys.modules
is_new, yaml = "numba" not in modules, modules.get("yaml")
modules["yaml"] = None  # importing it fails
try:
    with warnings.catch_warnings(action="ignore"):  # of a file that cannot be read
        import llvmlite
        import numba
        from llvmlite import ir
        from numba import types
        from numba.core.compiler import CompileResult
        from numba.core.serialize import dumps
        from numba.extending import intrinsic, overload, register_jitable
finally:
    modules["yaml"] = yaml
    if yaml is None:
        del modules["yaml"]
if is_new:
    modules["numba.core.config"]._config_fname = os.devnull

__all__ = ["CompileResult", "dumps", "intrinsic", "ir", "llvmlite", "numba", "overload", "register_jitable", "types"]
