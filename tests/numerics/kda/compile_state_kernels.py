"""A process of its own: compiles the state kernels to sm_90 cubins with no GPU; prints sizes as JSON."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from harts_core.exec.kda.state_kernels import (
    block_sizes,
    launch_options,
    state_backward_kernel,
    state_forward_kernel,
)

FLOAT32 = {"g", "initial", "states", "dstates", "dinitial"}
INT32 = {"offsets", "chunk_offsets", "slots"}


def compile_kernel(kernel: object, *, dtype: str, head: int) -> dict[str, int]:
    BK, BV = block_sizes(head, head)
    constants = {"H": 16, "K": head, "V": head, "B": 64, "BK": BK, "BV": BV}
    signature = {}
    for name in kernel.arg_names:  # type: ignore[attr-defined]
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "*i32" if name in INT32 else "*fp32" if name in FLOAT32 else f"*{dtype}"
    pointers = [i for i, kind in enumerate(signature.values()) if kind != "constexpr"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch_options(head))
    return {"cubin_bytes": len(compiled.asm["cubin"]), "shared_bytes": compiled.metadata.shared}


if __name__ == "__main__":
    kernels = {"forward": state_forward_kernel, "backward": state_backward_kernel}
    print(
        json.dumps(
            {
                f"{name} {dtype} {head}": compile_kernel(kernel, dtype=dtype, head=head)
                for name, kernel in kernels.items()
                for dtype in ("bf16", "fp32")
                for head in (128, 256)
            }
        )
    )
