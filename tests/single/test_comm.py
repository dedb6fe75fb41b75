"""CommModel: a function that never drops, fits that survive noise, real networks that jump."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvd_pipe.planning import comm
from hvd_pipe.planning.comm import CommModel, allreduce, fit, fit_error, measured

DATA = Path(__file__).parent.parent / "data"
FloatArray = npt.NDArray[np.float64]


def osu(nodes: int) -> tuple[FloatArray, FloatArray]:
    rows = np.loadtxt(
        DATA / f"osu_allreduce_10gbe_{nodes}nodes.csv", delimiter=",", comments="#", skiprows=2
    )
    return rows[:, 0], rows[:, 1] * 1e-6


def test_doctests() -> None:
    assert doctest.testmod(comm).failed == 0
    assert doctest.testmod(comm).attempted > 10


def test_numbers_and_arrays_agree_on_both_sides_of_a_start() -> None:
    model = CommModel((0, 8192, 524288), (8e-5, 9e-4, 1e-3), (1.5e-8, 3e-9, 3.4e-9))
    sizes = np.array([[0, 8191, 8192], [8193, 524288, 1 << 30]])
    times = model(sizes)
    assert times.shape == sizes.shape
    assert times.dtype == np.float64
    assert times.ravel().tolist() == [model(int(size)) for size in sizes.ravel()]
    assert isinstance(model(3), float)
    assert model(8191) == 8e-5 + 1.5e-8 * 8191
    assert model(8192) == 9e-4 + 3e-9 * 8192
    assert hash(model) == hash(CommModel(model.starts, model.intercepts, model.slopes))


# 10 s more for one byte more, at 10 MB, is a line through -1e8 s: seconds, in doubles.
ROUNDING = 1e-7

samples = st.lists(
    st.tuples(st.integers(0, 10**7), st.floats(1e-6, 10.0)), min_size=2, max_size=30
).filter(lambda pairs: len({size for size, _ in pairs}) > 1)


@settings(deadline=None)
@given(samples)
def test_any_samples_give_models_that_never_drop(pairs: list[tuple[int, float]]) -> None:
    sizes, times = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    probes = np.unique(np.concatenate((np.linspace(0, 2e7, 200), sizes, np.maximum(0, sizes - 1))))
    for model in (fit(sizes, times), CommModel.table(sizes, times), measured(sizes, times)):
        values = model(probes)
        assert (values >= -ROUNDING).all()
        assert (np.diff(values) >= -ROUNDING).all()
        assert CommModel.from_json(json.loads(json.dumps(model.to_json()))) == model


@settings(deadline=None)
@example([2593, 2674, 2749], [1e-6] + [1.0] * 19)  # 1 us is a small difference of 32 s here
@given(
    st.lists(st.integers(0, 10**7), min_size=2, max_size=20, unique=True),
    st.lists(st.floats(1e-6, 10.0), min_size=20, max_size=20),
)
def test_table_goes_through_points_that_are_monotone(sizes: list[int], raw: list[float]) -> None:
    x, t = np.sort(np.array(sizes)), np.sort(np.array(raw[: len(sizes)]))
    np.testing.assert_allclose(CommModel.table(x, t)(x), t, rtol=1e-9, atol=ROUNDING)


def test_table_shrugs_off_an_outlier() -> None:
    x = np.arange(1, 41) * 1e4
    clean = 1e-3 + 2e-9 * x
    noisy = clean.copy()
    noisy[[5, 20]] *= 50
    noisy[12] /= 50
    table = CommModel.table(x, noisy)
    assert fit_error(table, x, clean) < 0.02
    assert np.max(np.abs(table(x) - clean) / clean) < 0.05


def test_table_beyond_its_ends() -> None:
    steep = CommModel.table([1000, 2000], [1.0, 3.0])  # the first line would start at -1 s
    assert steep.latency == 0.0
    assert [steep(500), steep(1000), steep(1500), steep(4000)] == [0.5, 1.0, 2.0, 7.0]
    gentle = CommModel.table([1000, 2000], [2.0, 3.0])
    assert [gentle(0), gentle(500), gentle(3000)] == [1.0, 1.5, 4.0]
    # The last two points hardly differ; the last factor of four knows better.
    tail = CommModel.table([100, 200, 300, 400], [1.0, 2.0, 3.9, 3.9])
    assert tail.slopes[-1] == pytest.approx(0.0106)


def test_median_of_each_size() -> None:
    x = [100, 100, 100, 1000, 1000, 1000]
    t = [1.0, 1.1, 90.0, 10.0, 0.1, 10.1]
    assert fit(x, t)(np.array([100, 1000])) == pytest.approx([1.1, 10.0])
    assert CommModel.table(x, t)(np.array([100, 1000])).tolist() == pytest.approx([1.1, 10.0])


@pytest.mark.parametrize("seed", range(5))
def test_fit_finds_the_line_under_noise_and_outliers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.repeat(np.geomspace(1e3, 1e8, 40), 3)
    t = (9e-4 + 7.4e-10 * x) * rng.lognormal(0, 0.05, x.size)
    t[rng.random(x.size) < 0.1] *= 20
    line = fit(x, t)
    assert line.latency == pytest.approx(9e-4, rel=0.05)
    assert line.slopes[0] == pytest.approx(7.4e-10, rel=0.05)


def test_fit_is_robust_where_an_outlier_is_the_median_of_its_size() -> None:
    x = np.linspace(1e4, 1e6, 30)
    t = 1e-3 + 5e-9 * x
    t[7] *= 30
    line = fit(x, t)
    assert line.latency == pytest.approx(1e-3, rel=1e-3)
    assert line.slopes[0] == pytest.approx(5e-9, rel=1e-3)


def test_fit_takes_the_best_of_what_is_allowed() -> None:
    below = fit([1, 2, 3], [0.1, 2.0, 4.0], weights=[1, 1, 1])  # a free line starts below 0
    assert below.latency == 0.0
    assert below.slopes[0] > 0.0
    falling = fit([1, 2, 3], [4.0, 3.0, 2.0])
    assert falling.slopes == (0.0,)
    assert 2.0 < falling.latency < 4.0


def test_weights_decide_which_sizes_count() -> None:
    x, t = [1.0, 2.0, 100.0, 200.0], [1.0, 2.0, 1000.0, 2000.0]
    assert fit(x, t, weights=[1e12, 1e12, 1, 1]).slopes[0] < 2.0
    assert fit(x, t, weights=[1, 1, 1e12, 1e12]).slopes[0] > 9.0


@pytest.mark.parametrize(
    ("nodes", "line_error"),
    [(2, 0.076), (8, 0.198)],
)
def test_real_networks_need_a_table(nodes: int, line_error: float) -> None:
    x, t = osu(nodes)
    line, table = fit(x, t), CommModel.table(x, t)
    assert line.latency > 0.0
    assert table.latency > 0.0
    assert fit_error(line, x, t) == pytest.approx(line_error, abs=1e-3)
    assert fit_error(table, x, t) < 0.005
    # On held-out points too: the table is no better for having memorised noise.
    half = CommModel.table(x[::2], t[::2])
    assert fit_error(half, x[1::2], t[1::2]) < 0.5 * fit_error(line, x[1::2], t[1::2])
    # The line is good enough on 2 nodes, not on 8, where the protocol changes twice.
    assert measured(x, t) == (line if nodes == 2 else table)


def test_the_usual_line_is_far_off_on_eight_nodes() -> None:
    """Least squares on absolute errors: 40% off on average, 942% at worst (common practice)."""
    x, t = osu(8)
    beta, alpha = np.polyfit(x, t, 1)
    usual = CommModel.linear(float(alpha), float(beta))
    assert fit_error(usual, x, t) == pytest.approx(0.40, abs=0.01)
    assert np.max(np.abs(usual(x) - t) / t) == pytest.approx(9.42, abs=0.01)
    assert fit_error(fit(x, t), x, t) < 0.5 * fit_error(usual, x, t)


@pytest.mark.parametrize(
    ("algorithm", "latency", "per_byte"),
    [
        ("ring", 14 * 1e-5, 2 * 7 / 8 * 1e-9 + 7 / 8 * 1e-10),
        ("recursive-doubling", 3 * 1e-5, 3 * 1.1e-9),
        ("halving-doubling", 6 * 1e-5, 2 * 7 / 8 * 1e-9 + 7 / 8 * 1e-10),
        ("double-binary-tree", 6 * 1e-5, 1.1e-9),
    ],
)
def test_formulas_for_eight_workers(algorithm: str, latency: float, per_byte: float) -> None:
    model = allreduce(8, 1e-5, 1e-9, 1e-10, algorithm)
    assert model.latency == pytest.approx(latency)
    assert model.slopes[0] == pytest.approx(per_byte)
    assert allreduce(1, 1e-5, 1e-9, 1e-10, algorithm)(1e9) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), ()), r"one entry a segment, got 0, 0 and 0"),
        (((0.0,), (1.0, 2.0), (0.0,)), r"one entry a segment, got 1, 2 and 1"),
        (((1.0,), (1.0,), (0.0,)), r"starts must begin with 0 and increase"),
        (((0.0, 5.0, 5.0), (1.0,) * 3, (0.0,) * 3), r"starts must begin with 0 and increase"),
        (
            ((0.0,), (-1e-3,), (0.0,)),
            r"latency must not be negative, got intercepts\[0\] = -0.001",
        ),
        (((0.0,), (1.0,), (-1.0,)), r"slopes must not be negative, got -1.0 s/byte"),
        (((0.0,), (float("nan"),), (1.0,)), r"intercepts must be finite"),
        (((0.0, 10.0), (1.0, 0.5), (0.0, 0.0)), r"at 10 bytes it falls from 1 s to 0.5 s"),
    ],
)
def test_bad_segments(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommModel(*arguments)


@pytest.mark.parametrize(
    ("x", "t", "message"),
    [
        ([], [], r"not empty, got shapes \(0,\)"),
        ([1, 2], [1.0], r"of one length.*\(2,\) and \(1,\)"),
        ([[1, 2]], [[1.0, 2.0]], r"1-D"),
        ([1, -2], [1.0, 1.0], r"bytes must be finite and not negative, got -2"),
        ([1, 2], [1.0, 0.0], r"seconds must be finite and positive, got 0; drop"),
        ([1, 2], [1.0, float("inf")], r"seconds must be finite and positive, got inf"),
        ([7, 7], [1.0, 2.0], r"at least 2 sizes, got only 7 bytes; measure a small and a large"),
    ],
)
def test_bad_samples(x: Any, t: Any, message: str) -> None:
    for estimate in (fit, measured, CommModel.table):
        with pytest.raises(ValueError, match=message):
            estimate(x, t)


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"no negative size, got -1 bytes"):
        CommModel.linear(1, 1)(-1)
    with pytest.raises(ValueError, match=r"no negative size, got -1 bytes"):
        CommModel.linear(1, 1)(np.array([3, -1]))
    with pytest.raises(ValueError, match=r"weights must be finite and positive, got -1"):
        fit([1, 2], [1.0, 2.0], weights=[1.0, -1.0])
    with pytest.raises(ValueError, match=r"one of ring, .*; got 'star'"):
        allreduce(4, 1, 1, algorithm="star")
    with pytest.raises(ValueError, match=r"workers must be at least 1, got 0"):
        allreduce(0, 1, 1)
    with pytest.raises(
        ValueError, match=r"an object of \['intercepts', 'slopes', 'starts'\], got"
    ):
        CommModel.from_json({"starts": [0.0]})
    with pytest.raises(ValueError, match=r"holds lists of numbers"):
        CommModel.from_json({"starts": [0.0], "intercepts": [[1.0]], "slopes": [0.0]})  # type: ignore[list-item]
