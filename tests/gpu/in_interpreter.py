"""Every Triton kernel against the readable form, bit for bit: on a GPU, or on the CPU in Triton's
interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton._C import libtriton
from triton.runtime import interpreter

from zfun import ops
from zfun.ops import reference
from zfun.ops import triton as kernels_of_triton
from zfun.ops.reference._rounding import fma_into

HALVES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(
    numel: int, seed: int, dtype: torch.dtype = torch.float32, *, special: bool = False
) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul_(3)
    if special and numel > 8:
        x[:8] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, 65504.0, 2.0**-24])
    return x.to(dtype)


def same(a: Tensor, b: Tensor, label: str) -> None:
    assert a.dtype == b.dtype, label
    assert a.shape == b.shape, label
    a, b = a.cpu(), b.cpu()
    if a.is_floating_point():
        assert torch.equal(a.isnan(), b.isnan()), label
        a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), label


def check_signs(device: str) -> None:
    for dtype in HALVES:
        for numel in (7, 1030):
            x = torch.stack([numbers(numel, 1, dtype, special=True), numbers(numel, 2, dtype)])
            x[1, 0] = torch.nan
            scales = torch.tensor([0.3, torch.nan]).to(dtype)
            with ops.use("reference"):
                packed, back = (
                    ops.pack_signs(x),
                    ops.unpack_signs(ops.pack_signs(x), numel, scale=scales, dtype=dtype),
                )
            same(kernels_of_triton.pack_signs(x.to(device)), packed, "pack_signs")
            same(
                kernels_of_triton.unpack_signs(packed.to(device), numel, scales.to(device)),
                back,
                "unpack_signs",
            )


def check_codes(device: str) -> None:
    for dtype in HALVES:
        for bits in (8, 4):
            for numel, block in ((1, 2), (1029, 100), (300, 256)):
                x = torch.stack([numbers(numel, seed, dtype, special=True) for seed in range(3)])
                x[1, -1] = torch.inf
                x[2] = torch.tensor(1e-42)
                with ops.use("reference"):
                    messages = ops.quantise(x, bits=bits, block=block)
                    read = ops.dequantise(messages, numel, bits=bits, block=block, dtype=dtype)
                    total = ops.sum_dequantised(
                        messages, numel, bits=bits, block=block, dtype=dtype
                    )
                out = torch.empty(messages.shape, dtype=torch.uint8, device=device)
                kernels_of_triton.quantise(x.to(device), out, bits=bits, block=block)
                same(out, messages, f"quantise {dtype} {bits} {numel} {block}")
                found, added = (
                    torch.empty(3, numel, dtype=dtype, device=device),
                    torch.empty(numel, dtype=dtype, device=device),
                )
                kernels_of_triton.dequantise(out, found, bits=bits, block=block)
                kernels_of_triton.sum_dequantised(out, added, bits=bits, block=block)
                same(found, read, f"dequantise {dtype} {bits}")
                same(added, total, f"sum_dequantised {dtype} {bits}")


def check_ravel(device: str) -> None:
    # The second leaf has a whole tile that begins at a multiple of 16 bytes; that of the last leaf
    # begins elsewhere.
    shapes = [(3,), (40, 30), (0,), (5, 5), (1100,)]
    offsets = [2, 32, 1300, 1400, 1501]
    for inner in HALVES:
        for outer in HALVES:
            leaves: list[Tensor | None] = [
                numbers(torch.Size(shape).numel(), 5, inner, special=True).view(shape)
                for shape in shapes
            ]
            leaves[3] = numbers(25, 6, inner).view(5, 5)
            for scale in (1.0, 0.37):
                expected = torch.full((2700,), 7.0, dtype=outer)
                with ops.use("reference"):
                    ops.ravel_into(expected, leaves, offsets, scale=scale)
                moved = [None if x is None else x.to(device) for x in leaves]
                for factor in (scale, torch.tensor(scale, dtype=torch.float64, device=device)):
                    out = torch.full((2700,), 7.0, dtype=outer, device=device)
                    assert kernels_of_triton.ravel_into(out, moved, offsets, factor)
                    same(out, expected, f"ravel {inner} {outer} {factor}")


def check_squares(device: str) -> None:
    for dtype in HALVES:
        for numel in (1, 31, 4096, 9001):
            # The range is wide, and some squares are representable in float64 only.
            x = (
                (numbers(numel, 3) * 10.0 ** (4 * numbers(numel, 4)))
                .to(dtype)
                .nan_to_num(1.0, 2.0, 3.0)
            )
            for value in (None, torch.inf, torch.nan):
                if value is not None:
                    x[numel // 2] = value
                with ops.use("reference"):
                    expected = ops.squares_in_bins(x)
                found = kernels_of_triton.squares_in_bins(x.to(device))
                totals = [ops.total_of_bins(row[None])[None] for row in (found, expected)]
                same(totals[0], totals[1], f"squares {dtype} {numel} {value}")
                assert bool(found[-1] == 0) == (value is None)


# Each rule, and how many moments it has.
STEPS: list[tuple[Any, int]] = [
    (ops.AdamRule(b1=0.9, b2=0.99, step_size=0.01, eps=1e-8, l2=0.1, correction=0.3), 2),
    (ops.AdamRule(b1=0.3, b2=0.99, step_size=0.01, eps=1e-8, decay=0.01), 2),
    (ops.SgdRule(learning_rate=0.1, l2=0.01), 0),
    (ops.SgdRule(learning_rate=0.1, momentum=0.9), 1),
    (ops.SgdRule(learning_rate=0.1, momentum=0.9, nesterov=True), 1),
    (ops.LionRule(b1=0.9, b2=0.99, learning_rate=0.01, decay=0.001), 1),
    (ops.AdagradRule(learning_rate=0.1, eps=1e-10, l2=0.01), 1),
]


def check_steps(device: str) -> None:
    numel, taken = 1100, []

    def through(*args: Any) -> bool:
        taken.append(kernels_of_triton.step(*args))
        return taken[-1]

    for index, (rule, num_moments) in enumerate(STEPS):
        for dtype, to_change in (
            (torch.float32, False),
            (torch.bfloat16, False),
            (torch.float16, True),
        ):
            param, grad = numbers(numel, 10 + index), numbers(numel, 20 + index, dtype)
            moments = [numbers(numel, 30 + place).abs() for place in range(num_moments)]
            change = torch.zeros(numel) if to_change else None
            expected, found = (
                [None if x is None else x.clone() for x in (param, grad, *moments, change)]
                for _ in range(2)
            )
            found = [None if x is None else x.to(device) for x in found]
            absent = [] if num_moments or not isinstance(rule, ops.SgdRule) else [None]
            # A product of half types is rounded before the kernel runs.
            scale = None if to_change else torch.tensor(0.37, dtype=torch.float64)
            with ops.use("reference"):
                rule(*expected[:-1], *absent, expected[-1], scale)
            kernels = SimpleNamespace(step=through)
            with (
                mock.patch("zfun.ops._steps.triton_for", return_value=kernels),
                mock.patch("zfun.ops._steps.is_plain", return_value=False),
            ):
                rule(*found[:-1], *absent, found[-1], scale)
            for place, (a, b) in enumerate(zip(found, expected, strict=True)):
                if a is None or b is None:
                    continue
                same(a, b, f"{rule} {dtype} {to_change} {place}")
    assert taken
    assert all(taken)


def check_steps_left_out(device: str) -> None:
    """A step reads its factor and its flag where they lie, and without the flag writes nothing."""
    for index, (rule, num_moments) in enumerate(STEPS):
        name = type(rule).__name__.removesuffix("Rule").lower()
        name = "plain_sgd" if name == "sgd" and not num_moments else name
        for numel, is_taken in ((1100, True), (1100, False), (7, False)):
            values = [numbers(numel, 40 + place) for place in range(2)]
            values += [numbers(numel, 50 + place).abs() for place in range(num_moments)]
            values[1][3] = torch.inf if not is_taken else 1.0
            scale = torch.tensor(0.37, dtype=torch.float64)
            flag = torch.tensor(is_taken)
            found, there, expected = (
                [x.to(place, copy=True) for x in values] for place in (device, device, "cpu")
            )
            if is_taken:
                reference.step(name, expected[0], expected[1], expected[2:], None, rule, 0.37)
            numbers_there = scale.to(device), flag.to(device)
            for kernels, held in ((kernels_of_triton, found), (reference, there)):
                kernels.step(name, held[0], held[1], held[2:], None, rule, *numbers_there)
                for a, b in zip(held, expected, strict=True):
                    same(a, b, f"{kernels.__name__} {rule} {index} {numel} {is_taken}")


def round_once(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """``x y + z`` with one rounding, as on a GPU.

    The interpreter of Triton 3.6, which torch 2.11 installs, also rounds the product.
    """
    del builder
    x, y, z = (
        torch.from_numpy(part.copy()) for part in np.broadcast_arrays(x.data, y.data, z.data)
    )
    fma_into(z, x, y, z)
    return interpreter.TensorHandle(z.numpy(), tl.float32)


CHECKS: list[Callable[..., None]] = [
    check_signs,
    check_codes,
    check_ravel,
    check_squares,
    check_steps,
    check_steps_left_out,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    rounds_once = hasattr(libtriton.interpreter, "fma_fp32")
    with (
        contextlib.nullcontext()
        if rounds_once
        else mock.patch.object(interpreter.InterpreterBuilder, "create_fma", round_once)
    ):
        for check in CHECKS:
            check(sys.argv[1])
            print(check.__name__)
