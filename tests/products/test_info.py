"""Builders and infos: what they hold, how they move, and how they refuse."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import sparseconv.products as sp
from tests.products.cases import CASES, inputs


def test_terms_are_sorted_by_output_and_keep_their_order_within_a_row():
    info = sp.sparse_product_info([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 1, 3], [1.0, 2.0, 3.0, 4.0], 5, 4, 4)
    assert info.seg_out.tolist() == [0, 1, 3, 3, 4, 4]
    assert info.index1.tolist() == [1, 0, 2, 3]
    assert info.index2.tolist() == [2, 3, 1, 0]
    assert info.scale.tolist() == [2.0, 1.0, 3.0, 4.0]
    assert info.index_out is None
    assert info.gather_index is None
    assert info.out_size == info.num_segments == 5


def test_the_three_infos_turn():
    forward, backward1, backward2 = CASES[0].infos()
    sizes = CASES[0].out_size, CASES[0].in1_size, CASES[0].in2_size
    assert (forward.out_size, forward.in1_size, forward.in2_size) == sizes
    assert (backward1.out_size, backward1.in1_size, backward1.in2_size) == (sizes[1], sizes[2], sizes[0])
    assert (backward2.out_size, backward2.in1_size, backward2.in2_size) == (sizes[2], sizes[0], sizes[1])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda v: torch.tensor(v, dtype=torch.int32)])
def test_columns_of_any_kind(kind):
    info = sp.sparse_scale_info(kind([2, 0]), kind([1, 1]), None, 2, 3)
    assert info.index.tolist() == [2, 0]
    assert info.scale is None
    assert info.index.dtype == torch.int32
    assert info.seg_out.dtype == torch.int64


def test_infos_move_pickle_and_name_their_device():
    info = CASES[0].infos()[0]
    assert info.to("cpu").device == torch.device("cpu")
    assert info.to("meta").device == torch.device("meta")
    again = pickle.loads(pickle.dumps(info))
    x, y = inputs("mul", CASES[0], False, False)
    assert torch.equal(sp.sparse_mul(x, y, again), sp.sparse_mul(x, y, info))
    assert sp.SparseScaleInfo(None, None, None, None, 3).device is None


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        (([0, 3], [0, 0], [0, 0], None, 1, 3, 1), ValueError, "index1 must lie within 0 .. 2.*entry 1 is 3"),
        (([0, -1], [0, 0], [0, 0], None, 1, 3, 1), ValueError, "index1 must lie within .*entry 1 is -1"),
        (([0, 1], [0, 1], [0, 0], None, 1, 3, 1), ValueError, "index2 must lie within"),
        (([0, 1], [0, 0], [0, 1], None, 1, 3, 1), ValueError, "index_out must lie within"),
        (([0, 1], [0], [0, 0], None, 1, 3, 1), ValueError, "one entry for each term"),
        (([0, 1], [0, 0], [0, 0], [1.0], 1, 3, 1), ValueError, "one entry for each term"),
        (([[0, 1]], [[0, 0]], [[0, 0]], None, 1, 3, 1), ValueError, "one entry for each term"),
        (([0.5, 1], [0, 0], [0, 0], None, 1, 3, 1), TypeError, "index1 must hold integers"),
        (([0, 1], [0, 0], [0, 0], [1j, 2j], 1, 3, 1), TypeError, "scale must hold real numbers"),
        (([], [], [], None, -1, 3, 1), ValueError, "the size of index_out must be at least 0"),
    ],
)
def test_builders_refuse(columns, error, words):
    with pytest.raises(error, match=words):
        sp.sparse_product_infos(*columns)


def test_builders_refuse_a_scale_that_wants_a_gradient():
    with pytest.raises(ValueError, match="sparse_vecsca"):
        sp.sparse_scale_infos([0], [0], torch.ones(1, requires_grad=True), 1, 1)


def info(**changes):
    fields = {
        "scale": torch.ones(3),
        "index1": torch.tensor([0, 1, 2]),
        "index2": torch.tensor([0, 1, 1]),
        "seg_out": torch.tensor([0, 2, 3]),
        "gather_index": None,
        "index_out": None,
        "out_size": 2,
    }
    return sp.SparseProductInfo(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"index1": torch.tensor([0, 1])}, ValueError, "one entry for each term"),
        ({"index1": torch.tensor([[0, 1, 2]])}, ValueError, "one dimension"),
        ({"index1": torch.tensor([0.0, 1.0, 2.0])}, TypeError, "int32 or int64"),
        ({"scale": torch.tensor([1, 2, 3])}, TypeError, "floating"),
        ({"out_size": 3}, ValueError, "number of segments"),
        ({"index_out": torch.tensor([0])}, ValueError, "as many entries"),
        ({"index_out": torch.tensor([0, 1]), "out_size": None}, ValueError, "out_size must be given"),
        ({"seg_out": torch.tensor([], dtype=torch.int64)}, ValueError, "S \\+ 1"),
        ({"index1": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError, "one device"),
    ],
)
def test_infos_refuse_when_made(changes, error, words):
    with pytest.raises(error, match=words):
        info(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seg_out": torch.tensor([0, 3, 2])}, "seg_out must ascend"),
        ({"seg_out": torch.tensor([0, 2, 9])}, "seg_out must ascend"),
        ({"index_out": torch.tensor([1, 1]), "out_size": 3}, "row 1 stands in it 2 times"),
        ({"index_out": torch.tensor([1, 3]), "out_size": 3}, "index_out must lie within"),
        ({"gather_index": torch.tensor([0, 1, 3])}, "gather_index must lie within"),
        ({"in1_size": 2}, "index1 must lie within 0 .. 1"),
        ({"in2_size": 1}, "index2 must lie within"),
        ({"index1": torch.tensor([0, -4, 1]), "in1_size": 3}, "entry 1 is -4"),
    ],
)
def test_validate_names_the_first_bad_entry(changes, words):
    with pytest.raises(ValueError, match=words):
        info(**changes).validate()


def test_validate_returns_the_info():
    good = info()
    assert good.validate() is good
    assert good.validate(in1_size=3, in2_size=2) is good


def test_calls_refuse():
    infos = CASES[0].infos()
    x, y = inputs("mul", CASES[0], False, False)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor"):
        sp.sparse_mul([1.0], y, *infos)
    with pytest.raises(TypeError, match=r"info as a SparseProductInfo, but got a sparseconv\.SparseScaleInfo"):
        sp.sparse_mul(x, y, sp.sparse_scale_info([0], [0], None, 1, 1))
    with pytest.raises(TypeError, match="int64"):
        sp.sparse_mul(x.long(), y, *infos)
    with pytest.raises(ValueError, match=r"rank 1"):
        sp.sparse_mul(x[0, 0], y, *infos)
    with pytest.raises(ValueError, match=r"rank 4"):
        sp.sparse_mul(x[None], y, *infos)
    with pytest.raises(ValueError, match="one batch size N"):
        sp.sparse_mul(x[:2], y, *infos)
    with pytest.raises(ValueError, match="the same C"):
        sp.sparse_mul(x[..., :2], y, *infos)
    with pytest.raises(ValueError, match="needs 4 rows in x, but x has 3"):
        sp.sparse_mul(x[:, :3], y, *infos)
    with pytest.raises(ValueError, match="needs 3 rows in y, but y has 2"):
        sp.sparse_mul(x, y[:, :2], *infos)
    with pytest.raises(ValueError, match="info_backward1 because x requires a gradient"):
        sp.sparse_mul(x.clone().requires_grad_(), y, infos[0])
    with pytest.raises(ValueError, match="info_backward2 because y requires a gradient"):
        sp.sparse_mul(x, y.clone().requires_grad_(), *infos[:2])
    with pytest.raises(ValueError, match="info_backward because x requires a gradient"):
        sp.sparse_scale(torch.ones(1, 1, requires_grad=True), sp.sparse_scale_info([0], [0], None, 1, 1))
    with pytest.raises(ValueError, match=r"\(N, M, C\)"):
        sp.sparse_scale(torch.ones(1), sp.sparse_scale_info([0], [0], None, 1, 1))
    with pytest.raises(ValueError, match="one device"):
        sp.sparse_mul(x, y, infos[0].to("meta"))
    with pytest.raises(ValueError, match=r"backward_infos\(info"):
        sp.sparse_scale(torch.ones(1, 1, requires_grad=True), sp.sparse_scale_info([0], [0], None, 1, 1))
    with torch.no_grad():
        sp.sparse_mul(x.clone().requires_grad_(), y, infos[0])


def test_hand_made_infos_are_checked_against_the_rows_of_the_inputs():
    x, y = torch.ones(2, 1), torch.ones(2, 1)
    with pytest.raises(ValueError, match="at least 3 rows in x"):
        sp.sparse_mul(x, y, info())
    with pytest.raises(ValueError, match="at least 6 rows in x"):
        sp.sparse_mul(x, y, info(index1=None, gather_index=torch.tensor([0, 5, 2]), scale=None, index2=None))
    with pytest.raises(ValueError, match="at least 3 rows in y"):
        sp.sparse_mul(torch.ones(3, 1), y, info(index2=None))
    with pytest.raises(ValueError, match="entry 0 is -1"):
        sp.sparse_mul(x, y, info(index1=torch.tensor([-1, 0, 0])))
    with pytest.raises(ValueError, match="at least 3 rows in x"):
        sp.sparse_scale(x, sp.SparseScaleInfo(None, torch.tensor([2]), None, None, None))


def test_replaced_fields_reach_the_operation():
    x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [10.0]])
    before = sp.sparse_mul(x, y, info())
    after = sp.sparse_mul(x, y, replace(info(), scale=torch.full((3,), 2.0)))
    assert torch.equal(after, 2 * before)


ROWS = {"in1_size": 3, "in2_size": 2}


@pytest.mark.parametrize("call", [False, True], ids=["made", "called"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seg_out": torch.tensor([0, 3, 2])}, "SparseProductInfo.seg_out must ascend"),
        ({"seg_out": torch.tensor([-1, 2, 3])}, "SparseProductInfo.seg_out must ascend"),
        ({"seg_out": torch.tensor([0, 2, 9])}, "SparseProductInfo.seg_out must ascend"),
        ({"index_out": torch.tensor([1, 1]), "out_size": 3}, "SparseProductInfo.index_out.*row 1 stands in it 2 times"),
        ({"index_out": torch.tensor([1, 3]), "out_size": 3}, "SparseProductInfo.index_out.*entry 1 is 3"),
        ({"index_out": torch.tensor([-1, 2]), "out_size": 3}, "SparseProductInfo.index_out.*entry 0 is -1"),
        ({"gather_index": torch.tensor([0, 1, 3])}, "SparseProductInfo.gather_index.*entry 2 is 3"),
        ({"gather_index": torch.tensor([0, -1, 2])}, "SparseProductInfo.gather_index.*entry 1 is -1"),
        ({"index1": torch.tensor([0, 1, 3])}, "SparseProductInfo.index1.*entry 2 is 3"),
        ({"index2": None}, "index2 is None.*terms reach 2.*in2_size"),
    ],
)
def test_values_of_an_info_are_looked_at_when_it_is_made(changes, words, call):
    x, y = torch.ones(3, 1), torch.ones(2, 1)
    use = (lambda made: sp.sparse_mul(x, y, made)) if call else (lambda made: made)
    with pytest.raises(ValueError, match=words):
        use(info(**{**ROWS, **changes}))


def test_calls_look_at_no_value(monkeypatch):
    """What is looked at once is not looked at again: a call must not wait for a GPU."""
    made = info()
    monkeypatch.setattr("sparseconv.products.values._facts", lambda *_: pytest.fail("a call looked at values"))
    sp.sparse_mul(torch.ones(3, 1), torch.ones(2, 1), made)
    sp.sparse_mul(torch.ones(3, 1), torch.ones(2, 1), made.to("cpu"))
    sp.sparse_product_infos([0, 1], [0, 0], [1, 1], None, 2, 2, 1)


def test_backward_infos_that_do_not_turn_are_refused():
    forward, backward1, backward2 = CASES[0].infos()
    x, y = inputs("mul", CASES[0], False, False)
    with pytest.raises(ValueError, match="info_backward1 to write 4 rows"):
        sp.sparse_mul(x, y, forward, backward2, backward1)
    beyond = sp.SparseScaleInfo(None, torch.tensor([0, 5]), None, None, None)
    good = sp.sparse_scale_info([0, 1], [0, 1], None, 2, 2)
    with pytest.raises(ValueError, match="info_backward to write 2 rows from 2"):
        sp.sparse_scale(torch.ones(2, 1), good, beyond)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: info(index1=[0, 1, 2]), "SparseProductInfo.index1 must be a torch.Tensor.*list.*torch.tensor"),
        (lambda: info(scale=np.ones(3)), "SparseProductInfo.scale.*numpy.ndarray.*as_tensor"),
        (lambda: info(seg_out=torch.tensor([0, 2, 3]).to_sparse()), "SparseProductInfo.seg_out.*layout"),
        (lambda: info(out_size=2.0), "SparseProductInfo.out_size must be an integer"),
        (lambda: info(in1_size="3"), "SparseProductInfo.in1_size must be an integer"),
        (lambda: info().to(torch.float64), "takes a device.*replace"),
        (lambda: info().to([0]), "device must be"),
        (lambda: sp.sparse_product_infos(None, [0], [0], None, 1, 1, 1), "index1.*None"),
        (lambda: sp.sparse_product_infos([0], [0], [0], None, 1.5, 1, 1), "size of index_out must be an integer"),
        (lambda: sp.sparse_product_infos(["a"], [0], [0], None, 1, 1, 1), "index1"),
        (lambda: sp.sparse_scale_infos([0], [0], {"a": 1}, 1, 1), "scale"),
    ],
)
def test_wrong_kinds_are_type_errors(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_an_unknown_device_is_a_value_error():
    with pytest.raises(ValueError, match="banana"):
        info().to("banana")


def test_a_scale_info_of_four_fields_by_position_and_by_name():
    scale, index, seg_out = torch.tensor([1.0, 10.0, 1.0]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
    x = torch.tensor([[1.0], [2.0]])
    for one in (
        sp.SparseScaleInfo(scale, index, seg_out, 2),
        sp.SparseScaleInfo(scale=scale, index=index, seg_out=seg_out, out_size=2),
        sp.SparseScaleInfo(scale, index, seg_out, None, 2),
        sp.SparseScaleInfo(scale, index, seg_out),
    ):
        assert (one.out_size, one.index_out) == (2, None)
        assert sp.sparse_scale(x, one).flatten().tolist() == [21, 2]
    with pytest.raises(ValueError, match="out_size"):
        sp.SparseScaleInfo(scale, index, seg_out, 3)
    with pytest.raises(ValueError, match="out_size must be given"):
        sp.SparseScaleInfo()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("summed", [False, True])
def test_gradients_of_infos_made_by_hand(gathered, placed, summed):
    scale, index1 = torch.tensor([1.0, 2.0, -3.0, 0.5]), torch.tensor([0, 2, 2, 1])
    index2, gather = torch.tensor([1, 0, 3, 1]), torch.tensor([3, 0, 0, 2, 1])
    terms = 5 if gathered else 4
    seg_out = torch.tensor([1, 3, 3, terms]) if summed else None  # the first term is left out
    segments = 3 if summed else terms
    index_out = torch.tensor([6, 0, 4, 2, 5])[:segments] if placed else None
    size = 7 if placed else segments
    columns = scale, index1, index2, seg_out, gather if gathered else None, index_out, size
    info = sp.SparseProductInfo(*columns)
    x, y = (torch.randn(rows, 2, dtype=torch.float64, requires_grad=True) for rows in (3, 5))
    infos = sp.backward_infos(info, 3, 5)
    assert torch.autograd.gradcheck(lambda x, y: sp.sparse_mul(x, y, info, *infos), (x, y))
    assert torch.autograd.gradgradcheck(lambda x, y: sp.sparse_mul(x, y, info, *infos), (x, y))
    if not gathered:
        scaled = sp.SparseScaleInfo(scale, index1, seg_out, index_out, size)
        (back,) = sp.backward_infos(scaled, 3)
        assert torch.autograd.gradcheck(lambda x: sp.sparse_scale(x, scaled, back), x)


def test_gradients_of_infos_made_by_hand_know_sizes_or_ask():
    info = sp.SparseScaleInfo(None, torch.tensor([0, 1]), None)
    with pytest.raises(ValueError, match="the rows of each input, 1 of a SparseScaleInfo"):
        sp.backward_infos(info)
    with pytest.raises(ValueError, match="index must lie within"):
        sp.backward_infos(info, 1)
    (back,) = sp.backward_infos(sp.SparseScaleInfo(None, torch.tensor([0, 1]), None, None, 2, 4))
    assert back.out_size == 4
    everything = sp.SparseScaleInfo(out_size=3)  # the identity
    x = torch.randn(3, 2, requires_grad=True)
    sp.sparse_scale(x, everything, *sp.backward_infos(everything, 3)).sum().backward()
    assert x.grad.tolist() == [[1, 1]] * 3
    with pytest.raises(TypeError, match="info must be a SparseScaleInfo or SparseProductInfo"):
        sp.backward_infos(x, 3)
