"""Triton's interpreter without what it does again and again: half of its time on small kernels."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any


def remember_the_language() -> None:
    """Look once for what of Triton's language is replaced while a kernel runs.

    The interpreter replaces it for every kernel, and for every function that a kernel calls, and
    looks through all members of the language every time. Members that are builtins stay so: here
    their names are remembered, and what is replaced is what would be. So are NumPy's dtypes, which
    it takes from a dictionary that it makes anew. Other versions of Triton are left as they are.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        language: Any = importlib.import_module("triton.language")
        patch_attribute, is_builtin = interpreter._patch_attr, language.core.is_builtin
        patch, dtype_of = interpreter._patch_builtin, interpreter._get_np_dtype
        signature = [*inspect.signature(patch).parameters]
    except (ImportError, AttributeError):
        return
    if signature != ["pkg", "builder", "scope"]:
        return
    names: dict[Any, list[str]] = {}
    dtypes: dict[str, Any] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            members = inspect.getmembers(pkg)
            names[pkg] = [name for name, member in members if is_builtin(member)]
        for name in names[pkg]:
            member = getattr(pkg, name)
            if is_builtin(member):  # not yet replaced, for the kernel that calls this function
                patch_attribute(pkg, name, member, builder, scope)

    def numpy_dtype(dtype: Any) -> Any:
        if type(dtype) is not language.dtype:  # pointers, blocks
            return dtype_of(dtype)
        if dtype.name not in dtypes:
            dtypes[dtype.name] = dtype_of(dtype)
        return dtypes[dtype.name]

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, numpy_dtype
