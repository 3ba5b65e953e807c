"""Pieces of sequences, batches and the mean over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zfun as zf
from zfun.errors import LeafError, OptionError
from zfun.parallel import sequence_batch, sequence_piece, token_mean


@given(size=st.integers(1, 4), each=st.integers(0, 3), dim=st.integers(-2, 1), zigzag=st.booleans())
def test_pieces_have_every_token_once(size: int, each: int, dim: int, zigzag: bool) -> None:
    length = 2 * size * each
    x = torch.arange(3 * length).view(3, length)
    x = x if dim % 2 else x.t().contiguous()
    chunks = x.split(each if zigzag else max(2 * each, 1), dim) if each else ()

    def main(group: zf.Group) -> torch.Tensor:
        return sequence_piece(x, group, dim, zigzag=zigzag)

    for rank, piece in enumerate(zf.simulate(size, main)):
        places = (rank, 2 * size - 1 - rank) if zigzag else (rank,)
        expected = torch.cat([chunks[place] for place in places], dim) if each else x
        assert torch.equal(piece, expected)


@given(
    size=st.integers(1, 4),
    length=st.integers(1, 19),
    zigzag=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_pieces_of_a_batch_are_the_whole_batch(
    size: int, length: int, zigzag: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 9, (2, length), generator=generator)
    lengths = torch.randint(0, length + 1, (2, 1), generator=generator)
    mask = torch.arange(length) < lengths
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask.long()}
    pieces = zf.simulate(size, lambda group: sequence_batch(batch, group, zigzag=zigzag, pad_id=0))
    # Each place of a row once: the token there, and the label that the token before it has.
    together = {key: torch.cat([piece[key] for piece in pieces], 1) for key in pieces[0]}
    order = together["position_ids"][0].argsort()
    whole = {key: leaf[:, order] for key, leaf in together.items()}
    grown = len(order)
    assert grown % (size * (2 if zigzag else 1)) == 0
    assert whole["position_ids"].tolist() == [list(range(grown))] * 2
    for row in range(2):
        assert whole["input_ids"][row].tolist() == ids[row].tolist() + [0] * (grown - length)
        kept = int(lengths[row])
        following = ids[row, 1:kept].tolist()
        assert whole["shift_labels"][row].tolist() == following + [-100] * (grown - len(following))


IDS = torch.arange(8).view(2, 4)
GROUP = zf.collectives.abstract_group(2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": IDS}, r"takes a mapping with input_ids; got \['labels'\]"),
        (IDS, "takes a mapping with input_ids; got a tensor"),
        ({"input_ids": IDS, "weights": IDS}, "got 'weights'; take it out"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, "for 'labels'; give all as many tokens"),
        ({"input_ids": IDS[0]}, "have the shape .samples, tokens.; got a tensor of shape"),
        (
            {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)},
            "such as those of packed sequences",
        ),
        (
            {"input_ids": IDS, "labels": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)},
            "padding on the left",
        ),
        (
            {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)},
            "no labels; add labels",
        ),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_by_name(batch: Any, message: str) -> None:
    with pytest.raises(LeafError, match=message):
        sequence_batch(batch, GROUP)


def test_lengths_that_the_ranks_do_not_divide_are_refused() -> None:
    five = torch.zeros(1, 5, dtype=torch.long)
    for options in ({"input_ids": five, "labels": five}, {"input_ids": five}):
        with pytest.raises(OptionError, match="got sequences of 5 tokens, 1 too few; pass pad_id"):
            sequence_batch(options, GROUP)
    with pytest.raises(OptionError, match="and a batch with labels"):
        sequence_batch({"input_ids": five}, GROUP, pad_id=0)
    with pytest.raises(OptionError, match="a sequence of 5 tokens for 4 chunks on 2 ranks"):
        sequence_piece(five, GROUP, zigzag=True)
    with pytest.raises(OptionError, match=r"got dim 2 of shape \(1, 5\)"):
        sequence_piece(five, GROUP, 2)


def test_the_mean_is_over_the_tokens_of_all_ranks() -> None:
    logits = torch.randn(2, 8, 5, dtype=torch.float64)
    labels = torch.tensor([[1, -100, -100, -100, -100, -100, -100, -100], [0, 1, 2, 3, 4, 0, 1, 2]])
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def main(group: zf.Group) -> float:
        mesh = zf.mesh(group, dp=2, sp=2)
        mine = [sequence_piece(x[mesh["dp"].rank, None], mesh["sp"]) for x in (logits, labels)]
        vg = zf.data_parallel(
            zf.value_and_grad(lambda p, batch: token_mean(p + batch[0], batch[1])),
            mesh["dp", "sp"],
        )
        return float(vg(torch.zeros(5, dtype=torch.float64), mine)[0])

    assert zf.simulate(4, main) == pytest.approx([float(plain)] * 4, abs=1e-14)
    half = token_mean(logits.bfloat16(), labels)
    assert half.total.dtype == torch.float32
    assert float(half) == pytest.approx(float(plain), rel=0.01)


def test_the_mean_of_one_token_without_a_dimension() -> None:
    found = token_mean(torch.tensor([0.0, 1.0, 3.0]), torch.tensor(2))
    expected = torch.nn.functional.cross_entropy(torch.tensor([0.0, 1.0, 3.0]), torch.tensor(2))
    assert float(found) == float(expected)
