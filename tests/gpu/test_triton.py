"""The Triton kernels: compiled for two architectures without a GPU, run in the interpreter, and on
a GPU where there is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels, or by itself")

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zfun.ops.triton import _codes, _ravel, _squares, _steps

P32, P16, P8, I64 = "*fp32", "*i16", "*u8", "*i64"
F, I = "fp32", "i32"  # noqa: E741

# Arguments in order; a string is a type, any other value a constant.
KERNELS: dict[str, list[Any]] = {
    "_pack": [P16, P8, I, I, 128],
    "_unpack": [P8, P32, P32, I, I, 1024],
    "_quantise": [P32, P8, I, I, 256, 128, 4],
    "_sum_codes": [P32, "*i8", P16, I, I, I, 4, 4],
    "_squares": [P16, I64, "*fp64", I, 128, 78],
    "_ravel": [I64, I64, P16, P32, 1024, True, True, P32],
    "_adam": [P32, P16, P32, P32, None, I, P8, P32, *[F] * 5, None, F, F, 1024, True, True],
    "_sgd": [P32, P32, P32, None, I, P8, *[F] * 4, 1024, True, False],
    "_lion": [P32, P16, P32, P32, I, None, *[F] * 7, 1024, False],
    "_adagrad": [P32, P32, P32, P32, I, P8, *[F] * 4, 1024, False],
}


# Options beside those of every kernel.
OPTIONS = {"_squares": {"num_warps": _squares.NUM_WARPS}}

compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
capabilities = pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])


def compiled(name: str, arguments: list[Any], capability: int) -> Any:
    kernel = next(
        getattr(module, name)
        for module in (_codes, _ravel, _squares, _steps)
        if hasattr(module, name)
    )
    assert len(arguments) == len(kernel.arg_names)
    signature = {
        arg: value if isinstance(value, str) else "constexpr"
        for arg, value in zip(kernel.arg_names, arguments, strict=True)
    }
    constants = {
        (place,): value for place, value in enumerate(arguments) if not isinstance(value, str)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False, **OPTIONS.get(name, {})}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@compiles
@capabilities
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_without_a_gpu(name: str, capability: int) -> None:
    ptx = compiled(name, KERNELS[name], capability).asm["ptx"]
    assert f".target sm_{capability}" in ptx
    # Each operation rounds once, except fused operations of Adam, which are fused on all devices.
    assert ("fma.rn" in ptx) == (name == "_adam")
    for fused in ("div.full", "div.approx", "sqrt.approx", "rcp.approx"):
        assert fused not in ptx, f"{name} has {fused}"


@compiles
@capabilities
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_ravel", [I64, I64, P16, F, 1024, False, True, P32]),
        ("_ravel", [I64, I64, P32, None, 1024, False, True, P32]),
        ("_ravel", [I64, I64, P16, None, 1024, False, True, P16]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value[2:])),
)
def test_whole_tiles_move_in_words_of_128_bits(
    name: str, arguments: list[Any], capability: int
) -> None:
    ptx = compiled(name, arguments, capability).asm["ptx"]
    assert re.search(r"ld\.global\.v4\.b32", ptx)
    assert re.search(r"st\.global\.v4\.b32", ptx)


@compiles
@capabilities
@pytest.mark.parametrize("name", ["_ravel", "_squares", "_quantise"])
def test_a_thread_needs_at_most_64_registers(name: str, capability: int, tmp_path: Path) -> None:
    """So that a multiprocessor of 65,536 registers has 1,024 threads."""
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled(name, KERNELS[name], capability).asm["cubin"])
    reader = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not reader.exists():
        pytest.skip("this Triton brings no cuobjdump")
    usage = subprocess.run(
        [reader, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    registers, spilled = map(int, found.groups())
    assert registers <= 64
    assert spilled == 0


@pytest.mark.slow
def test_kernels_equal_the_readable_forms_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.in_interpreter", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "check_signs",
        "check_codes",
        "check_ravel",
        "check_squares",
        "check_steps",
        "check_steps_left_out",
    ]


def checks() -> list[Callable[..., None]]:
    from tests.gpu import in_interpreter

    return in_interpreter.CHECKS


@pytest.mark.cuda
@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__)
def test_kernels_equal_the_readable_forms_on_a_gpu(check: Callable[..., None]) -> None:
    check("cuda")
