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
    _remember_shapes(language.core)
    _assert_only_what_is_looked_at(interpreter.TritonSemantic)


def _assert_only_what_is_looked_at(semantic: Any) -> None:
    """Without ``debug`` nothing is asserted; but for every sum and product of integers the
    interpreter takes it again in 64 bits, for an assertion that it does not overflow."""
    if "options.debug" not in inspect.getsource(semantic.device_assert):
        return
    assert_no_overflow = semantic.binary_op_sanitize_overflow_impl

    def assert_with_debug(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            assert_no_overflow(self, *args)

    semantic.binary_op_sanitize_overflow_impl = assert_with_debug


def _remember_shapes(core: Any) -> None:
    """Say once what a block of such a shape is, and a tensor of such a type: every operation makes
    some of both, and all but their elements' type and their numbers follows from the shape."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    takes = [[*inspect.signature(make).parameters] for make in (make_block, make_tensor)]
    if takes != [["self", "element_ty", "shape"], ["self", "handle", "type"]]:
        return
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = {name: x for name, x in vars(self).items() if name != "element_ty"}
        else:
            vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.name
        if key not in tensors:
            make_tensor(self, handle, type)
            own = ("handle", "type", "dtype")
            tensors[key] = {name: x for name, x in vars(self).items() if name not in own}
        else:
            vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
