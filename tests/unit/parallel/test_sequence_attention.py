"""Attention over a sequence axis, beside plain attention on one process."""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import zfun as zf
from tests.conftest import examples
from zfun.errors import CollectiveMismatch, OptionError
from zfun.parallel import _sequence_ring, ring_attention, sequence_piece, ulysses
from zfun.testing import assert_same_bits

# torch's own rules for forward mode use torch.jit.script, which torch deprecates.
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


class Case(NamedTuple):
    """Shapes of a whole sequence, over some ranks."""

    size: int
    heads: int
    kv_heads: int
    tokens: int
    causal: bool
    zigzag: bool
    head_dim: int = 3
    value_dim: int = 3
    samples: int = 2
    scale: float | None = None

    def tensors(self, count: int = 4) -> list[Tensor]:
        """q, k, v, and a gradient of the result."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
        shapes = [
            (self.heads, self.head_dim),
            (self.kv_heads, self.head_dim),
            (self.kv_heads, self.value_dim),
            (self.heads, self.value_dim),
        ]
        return [
            torch.randn(
                self.samples, heads, self.tokens, dim, dtype=torch.float64, generator=generator
            )
            for heads, dim in shapes[:count]
        ]

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention written out."""
        repeats, tokens = q.shape[1] // k.shape[1], q.shape[2]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scores = q @ k.transpose(-1, -2) * scale
        if self.causal:
            later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ v

    def ring(self, group: zf.Group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(
            q, k, v, group, causal=self.causal, zigzag=self.zigzag, scale=self.scale
        )

    def ulysses(self, group: zf.Group, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ulysses(scaled_dot_product_attention, group)(
            q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=True
        )

    def pieces(self, group: zf.Group, tensors: Any) -> list[Tensor]:
        return [sequence_piece(x, group, 2, zigzag=self.zigzag).contiguous() for x in tensors]


def differentiated(fn: Any, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = fn(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def assert_pieces(group: zf.Group, case: Case, found: Any, whole: Any) -> None:
    for mine, expected in zip(found, case.pieces(group, whole), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-12)


def check(case: Case, kind: str) -> None:
    *tensors, grad = case.tensors()
    whole = differentiated(case.plain, tensors, grad)

    def main(group: zf.Group) -> None:
        *mine, of_mine = case.pieces(group, (*tensors, grad))
        found = differentiated(lambda *x: getattr(case, kind)(group, *x), mine, of_mine)
        assert_pieces(group, case, found, whole)

    zf.simulate(case.size, main)


@st.composite
def ring_cases(draw: st.DrawFn) -> Case:
    size, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Case(
        size=size,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        tokens=2 * size * draw(st.integers(1, 4)),
        causal=draw(st.booleans()),
        zigzag=draw(st.booleans()),
        head_dim=draw(st.integers(1, 5)),
        value_dim=draw(st.integers(1, 5)),
        samples=draw(st.integers(1, 2)),
        scale=draw(st.sampled_from([None, 1.0, 5.0])),
    )


@settings(max_examples=examples(80))
@given(case=ring_cases(), tile=st.sampled_from([1, 2, 3, 1024]))
def test_ring_attention_is_plain_attention(case: Case, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sequence_ring, "_TILE", tile)
        check(case, "ring")


@st.composite
def ulysses_cases(draw: st.DrawFn) -> Case:
    size, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    heads = kv_heads * draw(st.integers(1, 4))
    return Case(
        size=size,
        heads=heads * (1 if heads % size == 0 else size),
        kv_heads=kv_heads,
        tokens=size * draw(st.integers(1, 4)),
        causal=draw(st.booleans()),
        zigzag=False,
        value_dim=draw(st.integers(1, 4)),
    )


@settings(max_examples=examples(64))
@given(case=ulysses_cases())
def test_ulysses_is_plain_attention_for_any_heads(case: Case) -> None:
    check(case, "ulysses")


SMALL = Case(2, 4, 2, 8, causal=True, zigzag=True)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("causal", [True, False])
def test_derivatives_of_torch_func(kind: str, causal: bool) -> None:
    case = SMALL._replace(zigzag=kind == "ring", causal=causal)
    tensors, tangents = case.tensors(3), [x.flip(2) for x in case.tensors(3)]
    whole = torch.func.jvp(case.plain, tuple(tensors), tuple(tangents))
    energy = lambda fn: lambda *x: fn(*x).square().sum()
    grads = torch.func.grad(energy(case.plain), (0, 1, 2))(*tensors)

    def hessian_product(fn: Any, inputs: Any, vectors: Any) -> Any:
        inputs = [x.clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(fn(*inputs).square().sum(), inputs, create_graph=True)
        product = torch.stack([(a * b).sum() for a, b in zip(first, vectors, strict=True)]).sum()
        return torch.autograd.grad(product, inputs)

    second = hessian_product(case.plain, tensors, tangents)
    batched = torch.func.vmap(case.plain)(*[torch.stack([x, x + 1]) for x in tensors])

    def main(group: zf.Group) -> None:
        mine, along = case.pieces(group, tensors), case.pieces(group, tangents)
        # torch's own attention has no derivative in forward mode.
        fn = functools.partial(case.ring, group) if kind == "ring" else ulysses(case.plain, group)
        assert_pieces(group, case, torch.func.jvp(fn, tuple(mine), tuple(along)), whole)
        assert_pieces(group, case, torch.func.grad(energy(fn), (0, 1, 2))(*mine), grads)
        assert_pieces(group, case, hessian_product(fn, mine, along), second)
        many = torch.func.vmap(fn)(*[torch.stack([x, x + 1]) for x in mine])
        for out, expected in zip(many, batched, strict=True):
            assert_pieces(group, case, [out], [expected])
        # The level of forward mode is that of simulate().
        duals = map(torch.autograd.forward_ad.make_dual, mine, along)
        found = torch.autograd.forward_ad.unpack_dual(fn(*duals))
        assert_pieces(group, case, found, whole)

    zf.simulate(2, main)


def test_autocast_gives_the_bits_of_its_dtype() -> None:
    """As torch's attention: the operands are cast, and the sums stay in float32."""
    case = Case(2, 4, 2, 8, causal=True, zigzag=False, head_dim=4)
    *tensors, grad = [x.float() for x in case.tensors()]

    def main(group: zf.Group, is_auto: bool) -> Any:
        mine = [sequence_piece(x, group, 2).clone().requires_grad_() for x in tensors]
        q, k, v = mine if is_auto else [x.bfloat16() for x in mine]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_auto):
            out = ring_attention(q, k, v, group, causal=True)
            out.backward(sequence_piece(grad, group, 2).to(torch.bfloat16))
        return out.detach(), [x.grad for x in mine]

    found = zf.simulate(2, main, True)
    assert found[0][0].dtype == torch.bfloat16
    assert_same_bits(found, zf.simulate(2, main, False))


@pytest.mark.parametrize("causal", [True, False])
def test_half_types_add_in_float32(causal: bool) -> None:
    case = SMALL._replace(causal=causal)
    *tensors, grad = [x.bfloat16() for x in case.tensors()]
    whole = differentiated(case.plain, [x.double() for x in tensors], grad.double())

    def main(group: zf.Group) -> None:
        *mine, of_mine = case.pieces(group, (*tensors, grad))
        found = differentiated(lambda *x: case.ring(group, *x), mine, of_mine)
        for a, b in zip(found, case.pieces(group, whole), strict=True):
            assert a.dtype == torch.bfloat16
            torch.testing.assert_close(a.double(), b, atol=0.02, rtol=0.01)

    zf.simulate(2, main)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bytes_are_those_of_the_formula(size: int) -> None:
    case = Case(size, 4, 2, 16, causal=True, zigzag=True)
    *tensors, grad = case.tensors()

    def main(group: zf.Group) -> None:
        for kind in ("ring", "ulysses"):
            one = case._replace(zigzag=kind == "ring")
            log = zf.record(group)
            *mine, of_mine = one.pieces(group, (*tensors, grad))
            inputs = [x.requires_grad_() for x in mine]
            out = getattr(one, kind)(log, *inputs)
            forward, log.log[:] = [*log.log], []
            out.backward(of_mine)
            q, k, v = (x.nbytes for x in mine)
            if kind == "ring":
                hops = 0 if size == 1 else size - 1
                assert [x.sent_bytes for x in forward] == [k + v] * hops
                assert [x.sent_bytes for x in log.log] == [k + v] * 2 * hops
                assert {x.kind for x in (*forward, *log.log)} <= {"permute"}
            elif size > 1:
                repeats = max(size // case.kv_heads, 1)
                whole = [q, repeats * k, repeats * v, out.nbytes]
                sent = [nbytes * (size - 1) // size for nbytes in whole]
                assert [x.sent_bytes for x in forward] == sent
                assert sorted(x.sent_bytes for x in log.log) == sorted(sent)
                assert {x.kind for x in (*forward, *log.log)} == {"all_to_all"}

    zf.simulate(size, main)


def test_a_balanced_ring_gives_every_rank_the_same_work() -> None:
    def scores(group: zf.Group, zigzag: bool) -> int:
        ring = _sequence_ring.KeyRing(group, causal=True, scale=1.0, zigzag=zigzag)
        tiles = [tile for source in range(group.size) for tile in ring.tiles(source, 64, 64)]
        return sum(
            (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            for tile in tiles
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sequence_ring, "_TILE", 4)
        assert len({*zf.simulate(4, scores, True)}) == 1
        uneven = zf.simulate(4, scores, False)
        assert uneven[3] > 3 * uneven[0]


def test_attention_that_cannot_be_cut_is_refused_by_name() -> None:
    q = torch.zeros(1, 6, 4, 2)
    plain = scaled_dot_product_attention

    def main(group: zf.Group) -> None:
        attend = ulysses(plain, group)
        with pytest.raises(OptionError, match="divide the heads; got 6 heads of q over 4 ranks"):
            attend(q, q, q)
        eight = q.expand(1, 6, 4, 2).repeat(1, 4, 1, 1)
        with pytest.raises(OptionError, match="24 heads of q and 5 of k and v"):
            attend(eight, eight[:, :5], eight[:, :5])
        with pytest.raises(OptionError, match=r"covers the whole sequence.*got shape \(4, 4\)"):
            attend(eight, eight, eight, attn_mask=torch.ones(4, 4, dtype=torch.bool))
        with pytest.raises(OptionError, match="covers the whole sequence"):
            attend(eight, eight, eight, attn_mask=torch.ones(1, 24, 16, 16, dtype=torch.bool))
        with pytest.raises(OptionError, match="got q of shape \\(6, 4, 2\\)"):
            attend(q[0], q[0], q[0])
        with pytest.raises(OptionError, match="takes tensors of shape"):
            ring_attention(q[0], q[0], q[0], group)
        with pytest.raises(OptionError, match="which divide those of q"):
            ring_attention(q, q[:, :4], q[:, :4], group)
        with pytest.raises(OptionError, match="a key for each query"):
            ring_attention(q, q[:, :, :2], q[:, :, :2], group, causal=True)
        short = q[:, :, :3]
        with pytest.raises(OptionError, match="two chunks of equal length"):
            ring_attention(short, short, short, group, causal=True, zigzag=True)
        with pytest.raises(OptionError, match="one floating dtype"):
            ring_attention(q, q.double(), q, group)

    zf.simulate(4, main)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_pieces_of_other_lengths_are_refused(kind: str) -> None:
    case = SMALL._replace(zigzag=False)

    def main(group: zf.Group) -> None:
        mine = [x[:, :, : 4 - 2 * group.rank] for x in case.pieces(group, case.tensors(3))]
        getattr(case, kind)(group, *mine)

    with pytest.raises(CollectiveMismatch, match=r"ring attention|ulysses"):
        zf.simulate(2, main)


def test_a_mask_of_the_whole_sequence_is_honoured() -> None:
    case = Case(2, 2, 2, 6, causal=False, zigzag=False)
    q, k, v = case.tensors(3)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    mask |= torch.eye(6, dtype=torch.bool)
    whole = scaled_dot_product_attention(q, k, v, mask)

    def main(group: zf.Group) -> None:
        out = ulysses(scaled_dot_product_attention, group)(*case.pieces(group, (q, k, v)), mask)
        assert_pieces(group, case, [out], [whole])

    zf.simulate(2, main)


def test_queries_and_keys_of_other_lengths_without_a_mask() -> None:
    case = Case(2, 2, 2, 6, causal=False, zigzag=False)
    q, k, v = case.tensors(3)
    whole = scaled_dot_product_attention(q[:, :, :4], k, v)

    def main(group: zf.Group) -> None:
        out = case.ring(group, *case.pieces(group, (q[:, :, :4], k, v)))
        assert_pieces(group, case, [out], [whole])

    zf.simulate(2, main)
