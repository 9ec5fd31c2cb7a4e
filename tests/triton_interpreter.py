"""Runs Triton kernels, flash-linear-attention's and our own, on the CPU in Triton's interpreter.

Call ``enable()`` before anything imports ``fla`` or a module with kernels, in a process of its own: it
changes Triton for the whole process. What the stock interpreter (triton 3.4 to 3.9) lacks for these kernels:

- Autotuning wants timings: the first configuration wins instead.
- ``for i in range(n)`` gives Python integers, where compiled kernels see scalars (``i.to(tl.int64)``).
- Builtins that a module took by name at import (``gather = tl.gather``) miss the interpreter's own patching.
- Dot precisions that only GPUs have are refused; the interpreter's dots are exact anyway.
- bfloat16 is kept as raw 16-bit integers and computed with as such: ``ml_dtypes`` gives numpy the type.

It says nothing about races, shared memory or other configurations: those need a GPU.
"""

from __future__ import annotations

import ast
import os
from typing import Any


def enable() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["FLA_CACHE_RESULTS"] = "0"  # the on-disk autotune cache asks for an active GPU driver
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    import triton.runtime.interpreter as interpreter

    _fix_autotuner()
    _fix_range(interpreter)
    _fix_gather(interpreter)
    options = interpreter.interpreter_builder.options
    precisions = (*options.allowed_dot_input_precisions, "bf16x3", "bf16x6")
    object.__setattr__(options, "allowed_dot_input_precisions", precisions)
    _fix_bfloat16(interpreter)


def _fix_autotuner() -> None:
    from triton.runtime.autotuner import Autotuner

    def bench(self: Any, *args: Any, config: Any = None, **kwargs: Any) -> list[float]:
        return [1.0, 1.0, 1.0]

    def no_disk_cache(self: Any, key: Any, configs: Any, bench_all: Any) -> bool:
        bench_all()
        return False

    Autotuner._bench = bench
    Autotuner.check_disk_cache = no_disk_cache


def _fix_range(interpreter: Any) -> None:
    semantic = interpreter.interpreter_semantic

    def to_int(x: Any) -> int:
        return int(x.handle.data.item()) if hasattr(x, "handle") else int(getattr(x, "value", x))

    def scalar_range(*bounds: Any) -> Any:
        for i in range(*map(to_int, bounds)):
            yield semantic.to_tensor(i, False)

    class RewriteRange(type(interpreter.FunctionRewriter.ast_transformer)):  # type: ignore[misc]
        def visit_For(self, node: ast.For) -> Any:
            node = self.generic_visit(node)
            call = node.iter
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
                call.func = ast.copy_location(ast.Name(id="_scalar_range", ctx=ast.Load()), call.func)
            return node

    interpreter._scalar_range = scalar_range  # kernels see the interpreter module's globals
    interpreter.FunctionRewriter.ast_transformer = RewriteRange()


def _fix_gather(interpreter: Any) -> None:
    import triton.language as tl

    stock, semantic = tl.gather, interpreter.interpreter_semantic

    def gather(src: Any, index: Any, axis: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return stock(src, index, axis, _semantic=_semantic or semantic)

    gather.__triton_builtin__ = True  # type: ignore[attr-defined]
    tl.gather = tl.core.gather = gather


def _fix_bfloat16(interpreter: Any) -> None:
    import ml_dtypes
    import numpy as np
    import triton.language as tl

    bf16 = np.dtype(ml_dtypes.bfloat16)
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    stock_dtype, stock_load = interpreter._get_np_dtype, builder.create_masked_load
    stock_convert, stock_dot = builder.create_fp_to_fp, builder.create_dot

    def np_dtype(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return bf16 if scalar == tl.bfloat16 else stock_dtype(kind)

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *args: Any) -> Any:
        if ptrs.get_element_ty() != tl.bfloat16:
            return stock_load(self, ptrs, mask, other, *args)
        fill = np.zeros(ptrs.data.shape, bf16) if other is None else other.data
        bits = np.ascontiguousarray(np.broadcast_to(fill, ptrs.data.shape).astype(bf16)).view(np.uint16)
        loaded = interpreter._interpreter.load(ptrs.data, mask.data, bits, np.dtype(np.uint16))
        return handle(loaded.view(bf16), tl.bfloat16)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        data = value.data
        bits = np.ascontiguousarray(data).view(np.uint16) if data.dtype == bf16 else data
        return interpreter._interpreter.store(ptrs.data, bits, mask.data)

    def cast(self: Any, src: Any, kind: Any) -> Any:
        return handle(src.data.astype(np_dtype(kind)), kind.scalar)

    def convert(self: Any, src: Any, kind: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, kind.scalar):
            return cast(self, src, kind)
        return stock_convert(self, src, kind, rounding)

    def dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        a, b = (handle(x.data.astype(np.float32), tl.float32) if x.data.dtype == bf16 else x for x in (a, b))
        return stock_dot(self, a, b, *args)

    interpreter._get_np_dtype = np_dtype
    builder.create_masked_load, builder.create_masked_store = load, store
    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast, convert, dot
