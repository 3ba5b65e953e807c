"""Compiled kernels: vector code, a cache on disk if possible, one line for long compilation."""

from __future__ import annotations

import importlib
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import llvmlite.binding
import numba
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zfun
from zfun import ops

FP32, BF16 = torch.float32, torch.bfloat16
WIDE, NARROW, ONE = np.zeros(1, np.float32), np.zeros(1, np.uint16), np.float32(1)

# Packed instructions for one kind of work. A compiler chooses by processor, so each of them counts.
PACKED = {
    "multiply": r"vmulp[sd]|vfn?m(add|sub)\d+p[sd]",
    "add": r"v(add|sub)p[sd]|vfn?m(add|sub)\d+p[sd]",
    "fuse": r"vfn?m(add|sub)\d+p[sd]",
    "divide": r"vdivp[sd]",
    "root": r"vsqrtp[sd]",
    "shift": r"vps(ll|rl|ra)v?[wdq]|vpunpck[lh]wd|vpshufb",
    "count": r"vp(add|sub)q",
    "compare": r"vpcmp\w*q|vpmax[su]q",
    "collect": r"vp?or([dq]|p[sd])?|vpternlog[dq]",
}


def compiled(function: Any, *arguments: Any) -> str:
    """Return the machine code of a function for the types of some arguments."""
    fresh = numba.njit(nogil=True, error_model="numpy")(function)
    fresh.compile(tuple(numba.typeof(argument) for argument in arguments))
    return "\n".join(fresh.inspect_asm().values())


def missing(code: str, work: str) -> list[str]:
    """Return the kinds of work for which the code has no instruction on registers of AVX."""
    return [kind for kind in work.split() if not re.search(rf"\b({PACKED[kind]})\b.*%[yz]mm", code)]


def square(x: Any) -> None:
    for i in range(x.size):
        x[i] *= x[i]


@pytest.fixture(scope="module")
def avx2() -> None:
    """Skip on processors without AVX2, and where Numba is told to compile for one of those."""
    features = llvmlite.binding.get_host_cpu_features()
    told = {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & os.environ.keys()
    has = not missing(compiled(square, WIDE), "multiply") if told else features.get("avx2")
    if not has:
        pytest.skip("needs a processor with AVX2")


def step_code(rule: str, num_moments: int, num_constants: int, grads: Any) -> str:
    from zfun.ops.numba import _steps

    buffers = [WIDE, grads, *[WIDE] * num_moments, WIDE]
    function = getattr(_steps, rule).py_func
    return compiled(function, *buffers, 0, 1, (ONE,) * num_constants)


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize(
    ("rule", "num_moments", "num_constants", "work"),
    [
        ("adam", 2, 11, "root divide fuse"),
        ("adagrad", 1, 4, "root divide add"),
        ("sgd", 1, 5, "multiply add"),
        ("lion", 1, 7, "multiply add"),
    ],
)
@pytest.mark.parametrize("grads", [WIDE, NARROW], ids=["float32", "bfloat16"])
def test_steps_are_vector_code(
    rule: str, num_moments: int, num_constants: int, work: str, grads: Any
) -> None:
    assert missing(step_code(rule, num_moments, num_constants, grads), work) == []


@pytest.mark.usefixtures("avx2")
def test_casts_and_norms_are_vector_code() -> None:
    from zfun.ops.numba import _ravel, _squares, _sums

    for pair in ((WIDE, NARROW), (NARROW, WIDE)):
        code = compiled(_ravel._copy.py_func, *pair, ONE, False)
        assert missing(code, "multiply shift") == []
    for numbers in (WIDE, NARROW):
        code = compiled(_sums._add_up.py_func, np.zeros(2, np.int64), numbers, 0, 1, ONE)
        assert missing(code, "add") == []
    code = compiled(_squares.add_block.py_func, WIDE, np.zeros(1), np.zeros(71, np.int64))
    assert missing(code, "multiply add count compare collect") == []


@pytest.mark.usefixtures("avx2")
def test_scalar_code_is_told_from_vector_code() -> None:
    """Each number needs the one before it, so no compiler makes vector code of this loop."""

    def one_by_one(x: Any, words: Any) -> None:
        y, word = x[0], words[0]
        for i in range(x.size):
            y = math.sqrt(x[i] + y * x[i]) / (1 - fma(y, x[i], y))
            x[i] = y
        for i in range(words.size):
            word = max((word ^ words[i]) + words[i], words[i] << 3) | (word >> 2)
            words[i] = word

    from zfun.ops.numba._simd import fma

    code = compiled(one_by_one, WIDE, np.zeros(1, np.int64))
    assert missing(code, " ".join(PACKED)) == list(PACKED)


def test_half_types_convert_as_in_torch() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for half in (BF16, torch.float16):
        wide = torch.empty(2**16)
        ops.ravel_into(wide, [every.view(half)], [0])
        assert torch.equal(
            torch.nan_to_num(wide, 7.0), torch.nan_to_num(every.view(half).float(), 7.0)
        )
        # Every float32 number between two neighbours that may be a tie, or next to a tie.
        bits = (
            wide.view(torch.int32)[:, None]
            + torch.tensor([0, 1, 2**11, 2**12 - 1, 2**12, 2**12 + 1, 2**15 - 1, 2**15, 2**15 + 1])
        ).view(-1)
        values = bits.view(FP32)
        out = torch.empty(values.numel(), dtype=half)
        ops.ravel_into(out, [values], [0])
        expected = values.to(half)
        nan = torch.isnan(expected)
        assert torch.equal(torch.isnan(out), nan)
        assert torch.equal(out.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


def test_kernels_ignore_the_default_dtype_and_the_default_device_of_torch() -> None:
    x = torch.arange(-8.0, 56).view(1, 64)

    def results() -> list[torch.Tensor]:
        packed, messages = ops.pack_signs(x), ops.quantise(x, bits=8, block=32)
        out = torch.empty_like(x[0])
        ops.ravel_into(out, [x], [0])
        p, mu, nu = x[0].clone(), torch.zeros_like(x[0]), torch.zeros_like(x[0])
        rule = ops.LambRule(b1=0.5, b2=0.5, learning_rate=0.5, eps=1e-8)
        rule(p, x[0], mu, nu, None, segments=[(0, 64)])
        return [
            packed,
            ops.unpack_signs(packed, 64, dtype=BF16),
            ops.dequantise(messages, 64, bits=8, block=32, dtype=BF16),
            ops.sum_dequantised(messages.repeat(3, 1), 64, bits=8, block=32, dtype=BF16),
            ops.total_of_bins(ops.squares_in_bins(out)[None]),
            p,
        ]

    expected, before = results(), torch.get_default_dtype()
    for dtype in (torch.float64, BF16):
        torch.set_default_dtype(dtype)
        try:
            # Stands for a program that makes its tensors on an accelerator.
            with torch.device("meta"):
                found = results()
        finally:
            torch.set_default_dtype(before)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()


class RecordingTensor(torch.Tensor):
    """A tensor that records the operations on the tensor."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class RecordingMode(TorchDispatchMode):
    """Records the operations on any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_and_subclasses_see_the_operations_of_a_kernel() -> None:
    """Compiled code would bypass a tensor subclass or a mode, whose memory may not be readable."""
    x = torch.arange(4.0)
    out, step = torch.empty(4), ops.SgdRule(learning_rate=0.5)
    RecordingTensor.seen.clear()
    ops.ravel_into(out, [x.as_subclass(RecordingTensor)], [0])
    assert any("copy" in name for name in RecordingTensor.seen)
    for run, wanted in (
        (lambda: ops.ravel_into(out, [x], [0]), "copy"),
        (lambda: step(torch.ones(4), x, None, None), "mul"),
        (lambda: ops.squares_in_bins(x), "mul"),
    ):
        with RecordingMode() as mode:
            run()
        assert any(wanted in name for name in mode.seen), mode.seen


def test_a_tensor_of_zeros_without_memory_is_read_as_zeros() -> None:
    """Such tangents of forward-mode derivatives report the address 0."""
    zeros = torch._efficientzerotensor(9000)
    out, target = torch.ones(9001), torch.zeros(9000)
    ops.ravel_into(out, [zeros], [1])
    assert not out.any()
    assert ops.total_of_bins(ops.squares_in_bins(zeros)[None]) == 0
    assert not ops.sum_in_rank_order([zeros, zeros, zeros]).any()
    assert torch.equal(ops.pack_signs(zeros), ops.pack_signs(target))
    assert torch.equal(
        ops.quantise(zeros[None], bits=8, block=32), ops.quantise(target[None], bits=8, block=32)
    )
    p = torch.ones(9000)
    ops.SgdRule(learning_rate=0.5, l2=0.5)(p, zeros, None, None)
    assert torch.equal(p, torch.full((9000,), 0.75))


@pytest.mark.parametrize("kernels", ["reference", "compiled"])
def test_a_step_of_lion_along_zero_has_one_sign(kernels: str) -> None:
    p, change = torch.tensor([0.0, -0.0, 1.0]), torch.empty(3)
    rule = ops.LionRule(b1=0.5, b2=0.5, learning_rate=0.5)
    with ops.use(kernels):
        rule(p, torch.zeros(3), torch.zeros(3), change)
        rule(p, torch.zeros(3), torch.zeros(3), None)
    assert torch.signbit(change).tolist() == [True] * 3
    assert torch.signbit(p).tolist() == [False, True, False]


SEVERAL_THREADS = """
import atexit, os, signal, torch
from zfun import ops

torch.set_num_threads(2)
x = torch.ones(1 << 20)
norm = lambda: ops.total_of_bins(ops.squares_in_bins(x)[None]).item()
expected = norm()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    signal.alarm(20)
    os._exit(0 if norm() == expected else 1)
atexit.register(lambda: print("at the end", norm() == expected))
"""


@pytest.mark.processes
def test_kernels_with_several_threads_run_after_a_fork_and_at_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SEVERAL_THREADS],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(zfun.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "at the end True"


def test_under_torch_func_the_readable_form_runs() -> None:
    """Tensors inside a transform report an address but have no memory."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x * ops.ravel([x.detach()], [1], 5, dtype=FP32, device=x.device)[1:]).sum()

    x = torch.arange(4.0)
    assert torch.equal(torch.func.grad(loss)(x), x)


@pytest.mark.slow
def test_kernels_run_without_a_writable_cache(tmp_path: Path) -> None:
    # A file in the place of a cache folder also stops root, who may write to read-only folders.
    package = tmp_path / "site" / "zfun"
    shutil.copytree(
        Path(zfun.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in (package / "ops" / "numba", package):
        (folder / "__pycache__").write_text("in the way")
    home = tmp_path / "home"
    home.write_text("in the way")
    program = (
        "import torch, zfun; from zfun import ops;"
        "p, g = torch.ones(8), torch.ones(8);"
        "ops.SgdRule(learning_rate=0.5)(p, g, None, None);"
        "assert p.tolist() == [0.5] * 8, p; print(zfun.__file__)"
    )
    names = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {
        "HOME": str(home),
        "PYTHONPATH": str(package.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert str(package) in done.stdout
    assert not list(tmp_path.rglob("*.nbi"))


TWO_RANKS = """
import sys, torch, zfun as zf
from zfun import ops
from zfun.ops.numba import _compile

def main(group):
    _compile._LONG_S = 0.0
    ops.squares_in_bins(torch.ones(64))
    p, g = torch.ones(8), torch.ones(8)
    ops.SgdRule(learning_rate=0.5)(p, g, None, None)
    return p.tolist(), list(_compile.seconds_compiled())

if __name__ == "__main__":
    run = {"threads": zf.simulate, "processes": zf.collectives.spawn}[sys.argv[1]]
    values, kernels = zip(*run(2, main))
    assert values == ([0.5] * 8,) * 2, values
    assert {*kernels[0], *kernels[1]} == {"_add_squares", "plain_sgd"}, kernels
"""


@pytest.mark.slow
def test_long_compilation_is_reported_once_for_all_ranks(tmp_path: Path) -> None:
    """Start ranks as threads or as processes, with no machine code on disk: one rank prints one
    line.
    """
    script = tmp_path / "program.py"
    script.write_text(TWO_RANKS, encoding="utf-8")
    for kind in ("threads", "processes"):
        done = subprocess.run(
            [sys.executable, str(script), kind],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
            env={
                **os.environ,
                "NUMBA_CACHE_DIR": str(tmp_path / kind),
                "PYTHONPATH": str(Path(zfun.__file__).parents[1]),
            },
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("compiling CPU kernels") == 1, (kind, done.stderr)


def test_cached_machine_code_is_valid_until_a_helper_changes(tmp_path: Path) -> None:
    """Numba compares only the file of the kernel, so the code of an old helper would be reused."""
    from zfun.ops.numba import _compile

    source = "def twice(x):\n    for i in range(x.size):\n        x[i] = 2 * x[i]\n"
    (tmp_path / "some_kernel.py").write_text(source, encoding="utf-8")

    def num_compiled() -> int:
        kernel, x = _compile.jit(importlib.import_module("some_kernel").twice), np.ones(3)
        kernel(x)
        assert x.tolist() == [2.0, 2.0, 2.0]
        return sum(kernel.stats.cache_misses.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert [num_compiled(), num_compiled()] == [1, 0]
        patch.setattr(_compile, "_digest", lambda: "of a helper that has changed")
        assert [num_compiled(), num_compiled()] == [1, 0]


def test_only_compilation_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A busy machine takes seconds to load kept machine code, which is no compilation."""
    from zfun.ops.numba import _compile

    (tmp_path / "kept_kernel.py").write_text("def two(x):\n    x[0] = 2\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(_compile, "_LONG_S", 0.0)
    lines = []
    for _ in range(2):
        monkeypatch.setattr(_compile, "_compile_s", {})
        kernel = _compile.jit(importlib.import_module("kept_kernel").two)
        _compile.entry(kernel)(np.zeros(1))
        lines.append(caplog.text.count("compiling CPU kernels"))
    assert lines == [1, 1]


def test_a_stopped_process_that_compiles_does_not_stop_the_others(tmp_path: Path) -> None:
    """A process that is stopped, in a debugger say, keeps the lock beside the machine code."""
    from zfun.ops.numba import _compile

    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "other_kernel.py").write_text("def one(x):\n    x[0] = 1\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setattr(_compile, "_PATIENCE_S", 0.2)
        kernel, x = _compile.jit(importlib.import_module("other_kernel").one), np.zeros(1)
        lock = Path(kernel._cache.cache_path) / "one.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _compile.entry(kernel)(x)
    assert x.tolist() == [1.0]
