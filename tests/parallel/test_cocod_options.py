"""CoCoD's options against their equations, carried out for n workers in one process."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import workers_cocod_options as jobs
from cases import of_case
from fragments_reference import fragments_of
from problem import STEPS
from ranks import once, run_ranks, run_script
from reference import Trajectory, Vectors, Workers
from workers_cocod_options import (
    CODED,
    COMPRESSED,
    EXACT,
    HALF,
    JOINS_AT,
    LEAVES_AFTER,
    MOMENTS,
    OPTIMIZERS,
    PER_NODE,
    RESUMED,
    WITHIN,
    Case,
)

from hvd_pipe.strategy import CoCoD

TOLERANCE = 1e-12

trajectories = once(lambda n: run_ranks(n, jobs.run, n))
within = once(lambda n: run_ranks(n, jobs.run_within, n))
continued_within = once(lambda: run_ranks(3, jobs.run_resumed_within, 3))
continued = once(lambda n: run_ranks(n, jobs.run_resumed, n))
nodes = once(lambda: run_ranks(4, jobs.run_nodes))
others = once(lambda: run_ranks(3, jobs.run_others))

# The reference -----------------------------------------------------------------------------------

NONNEGATIVE = ("exp_avg_sq",)
Named = dict[str, torch.Tensor]  # one tensor a parameter and, with momentum="average", a moment


class Reference:
    """The strategy's docstring, with Python loops in the place of messages."""

    def __init__(self, case: Case, n: int, leaves_after: int | None = None) -> None:
        self.case, self.options = case, case.strategy(n)
        self.workers = Workers(n, OPTIMIZERS[case.optimizer])
        self.weights = self.options.weights or (1.0,) * n
        self.rounds = case.compression == "fp16" and n > 1
        self.leaves_after = leaves_after
        self.base: Named = {}
        self.anchor: Named = {}
        self.velocity: Named = {}
        self.clamped = 0
        sizes = [p.numel() for p in self.workers.models[0].parameters()]
        self.fragments = fragments_of(sizes, self.options.fragments)

    def run(self, steps: int = STEPS) -> Trajectory:
        options, workers = self.options, self.workers
        local_steps, fragment, start, mean = 0, 0, [], {}
        for step in range(steps):
            gradients = workers.gradients(step)
            if step < options.warmup_steps:
                average = self._rounded if self.rounds else self._weighted
                workers.update([average(gradients, step) for _ in gradients])
            else:
                if local_steps == 0:
                    start = self._values(fragment)
                    mean = self._mean(start, step)
                workers.update(self._within_nodes(gradients))
                local_steps += 1
                if local_steps == options.period // options.fragments:
                    self._finish(start, mean, fragment)
                    local_steps, fragment = 0, (fragment + 1) % options.fragments
            workers.record()
            if step in self.case.drains or step == steps - 1:
                values = self._values()
                self.base = self._exact_mean(values, step)
                self._set([self.base for _ in values])
                local_steps, fragment = 0, 0
                workers.record()
        return workers.trajectory

    def _within_nodes(self, gradients: list[Vectors]) -> list[Vectors]:
        """What each worker applies: its own gradient, or the mean of those of its node."""
        if self.options.within == "none":
            return gradients
        found = []
        for worker in range(len(gradients)):
            node = [i for i in range(len(gradients)) if i // PER_NODE == worker // PER_NODE]
            total = sum(self.weights[i] for i in node)
            columns = zip(*(gradients[i] for i in node), strict=True)
            found.append(
                [
                    torch.stack(
                        [self.weights[i] / total * x for i, x in zip(node, column, strict=True)]
                    ).sum(0)
                    for column in columns
                ]
            )
        return found

    def _outer_model(self, mean: Named) -> Named:
        """The outer model after DiLoCo's outer step; momenta keep their mean."""
        lr, mu = self.options.outer_lr, self.options.outer_momentum
        weights = {name: m for name, m in mean.items() if "." not in name}
        for name, m in weights.items():
            change = self.anchor.get(name, m) - m
            self.velocity[name] = mu * self.velocity.get(name, torch.zeros_like(m)) + change
            self.anchor[name] = m + change - lr * (change + mu * self.velocity[name])
        return {**mean, **{name: self.anchor[name] for name in weights}}

    def _finish(self, start: list[Named], mean: Named, fragment: int) -> None:
        alpha, beta = self.options.pull_back, self.options.anchor_momentum
        if self.options.outer != "none":
            mean = self._outer_model(mean)
        self.base |= mean
        z = dict(mean)
        if beta:
            for name, m in ((name, m) for name, m in mean.items() if "." not in name):
                moved_by = beta * self.velocity.get(name, torch.zeros_like(m))
                self.velocity[name] = moved_by + (m - self.anchor.get(name, m))
                z[name] = self.anchor[name] = self.anchor.get(name, m) + self.velocity[name]
        moved = []
        for end, begin in zip(self._values(fragment), start, strict=True):
            new = {}
            for name in begin:
                x, progress = end[name], end[name] - begin[name]
                x = mean[name] + progress if alpha is None else x - alpha * (x - z[name])
                if name.endswith(NONNEGATIVE):
                    self.clamped += int((x < 0).sum())
                    x = x.clamp(min=0)
                new[name] = x
            moved.append(new)
        self._set(moved)

    def _mean(self, values: list[Named], step: int) -> Named:
        exact = self._exact_mean(values, step)
        if not self.rounds or not {name for name in exact if "." not in name} <= set(self.base):
            return exact
        for name in (name for name in exact if "." not in name):  # momenta travel uncompressed
            differences = [[value[name] - self.base[name]] for value in values]
            exact[name] = self.base[name] + self._rounded(differences, step)[0]
        return exact

    def _exact_mean(self, values: list[Named], step: int) -> Named:
        return {
            name: self._weighted([[value[name]] for value in values], step)[0]
            for name in values[0]
        }

    def _weighted(self, vectors: list[Vectors], step: int) -> Vectors:
        present = range(len(vectors))
        if self.leaves_after is not None and step >= self.leaves_after:
            present = range(len(vectors) - 1)
        total = sum(self.weights[i] for i in present)
        columns = [[self.weights[i] / total * x for x in vectors[i]] for i in present]
        return [torch.stack(column).sum(0) for column in zip(*columns, strict=True)]

    def _rounded(self, vectors: list[Vectors], _: int) -> Vectors:
        """As `_weighted`, with numbers that are float16 on their way."""
        size, total = len(vectors), sum(self.weights)
        result = []
        for column in zip(*vectors, strict=True):
            whole = torch.zeros_like(column[0], dtype=torch.float16)
            for x, weight in zip(column, self.weights, strict=True):
                whole += (x * (weight * size / total)).to(torch.float16)
            result.append((whole / size).double())
        return result

    def _live(self, worker: int) -> Named:
        model, optimizer = self.workers.models[worker], self.workers.optimizers[worker]
        found: Named = {}
        for number, p in enumerate(model.parameters()):
            found[str(number)] = p.data
            if self.options.momentum == "average":
                for key, value in optimizer.state[p].items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape:
                        found[f"{number}.{key}"] = value
        return found

    def _values(self, fragment: int | None = None) -> list[Named]:
        """What is averaged, of all fragments or of one; momenta belong to the only one."""
        return [
            {
                name: tensor.clone()
                for name, tensor in self._live(i).items()
                if fragment is None or int(name.split(".")[0]) in self.fragments[fragment]
            }
            for i in range(len(self.workers.models))
        ]

    def _set(self, values: list[Named]) -> None:
        for worker, own in enumerate(values):
            live = self._live(worker)
            for name, value in own.items():
                live[name].copy_(value)


@cache
def expected(case: Case, n: int) -> Trajectory:
    return Reference(case, n).run()


def assert_close(ranks: list[npt.NDArray[np.float64]], want: Trajectory, atol: float) -> None:
    for rank, actual in enumerate(ranks):
        assert actual.shape == want[rank].shape
        errors = np.abs(actual - want[rank]).max(axis=1)
        wrong = np.flatnonzero(~(errors <= atol))
        assert not len(wrong), (
            f"rank {rank}: {len(wrong)} of {len(errors)} records differ, first record {wrong[0]} "
            f"by {errors[wrong[0]]:.3g}, at most by {np.nanmax(errors):.3g}"
        )


# Equations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EXACT, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_trajectory(n: int, case: Case) -> None:
    assert_close(of_case(trajectories(n), case), expected(case, n), TOLERANCE)


@pytest.mark.parametrize("case", [*EXACT, *COMPRESSED, *CODED, *HALF], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_replicas_are_equal_bit_for_bit_at_the_end(n: int, case: Case) -> None:
    first, *rest = of_case(trajectories(n), case)
    for other in rest:
        assert np.array_equal(other[-1], first[-1])
        assert not np.array_equal(other[-2], first[-2])


@pytest.mark.parametrize("case", COMPRESSED, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_differences_are_what_float16_rounds(n: int, case: Case) -> None:
    """Two float16 numbers have one sum; of three, it depends on who adds first."""
    assert_close(of_case(trajectories(n), case), expected(case, n), 1e-12 if n < 3 else 1e-4)


def test_differences_lose_less_than_models_would() -> None:
    case = COMPRESSED[0]
    whole = expected(Case(case.options, case.optimizer, case.drains), 2)
    lost = np.abs(np.array(of_case(trajectories(2), case)) - whole).max()
    rounded = np.abs(whole - whole.astype(np.float16)).max()
    assert 0 < lost < rounded


@pytest.mark.parametrize("case", CODED, ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_coded_differences(n: int, case: Case) -> None:
    want = expected(Case(case.options, case.optimizer, case.drains), n)
    assert_close(of_case(trajectories(n), case), want, 1e-2)


@pytest.mark.parametrize("case", HALF, ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_half_precision_parameters(n: int, case: Case) -> None:
    want = expected(Case(case.options, case.optimizer, case.drains), n)
    ulps = 8 * torch.finfo(case.dtype).eps
    for actual, one in zip(of_case(trajectories(n), case), want, strict=True):
        assert np.abs(actual.astype(np.float64) - one).max() < ulps


def test_the_cases_can_be_told_apart() -> None:
    for case in [*EXACT, *WITHIN]:
        options = case.options
        plain = CoCoD(options.period, options.warmup_steps)
        other = expected(Case(plain, case.optimizer, case.drains), 3)
        assert np.abs(expected(case, 3) - other).max() > 1e-3, case


def test_second_moments_would_become_negative() -> None:
    case = next(case for case in EXACT if case.optimizer == "hasty adam")
    reference = Reference(case, 3)
    reference.run()
    assert reference.clamped > 0


@pytest.mark.parametrize("case", WITHIN, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_workers_of_a_node_stay_equal(n: int, case: Case) -> None:
    """In every bit at all times; those of other nodes are equal after a drain."""
    ranks = of_case(within(n), case)
    assert_close(ranks, expected(case, n), TOLERANCE)
    for rank, actual in enumerate(ranks):
        assert np.array_equal(actual, ranks[rank // PER_NODE * PER_NODE])
        assert np.array_equal(actual[-1], ranks[0][-1])
        assert np.array_equal(actual[-2], ranks[0][-2]) == (rank < PER_NODE)


# Checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_going_on_from_a_state(case: Case, moment: int) -> None:
    assert_continued(of_case(continued(2), (case, moment)))


@pytest.mark.parametrize("moment", MOMENTS[1:4])
@pytest.mark.parametrize("case", WITHIN[1:3], ids=str)
def test_going_on_within_nodes(case: Case, moment: int) -> None:
    assert_continued(of_case(continued_within(), (case, moment)))


def assert_continued(ranks: list[jobs.Resumed]) -> None:
    for straight, saved, on_rank_0, resumed in ranks:
        assert np.array_equal(straight, saved)
        assert np.array_equal(straight, on_rank_0)
        assert np.array_equal(straight, resumed)


# Ranks that leave, or lack something -------------------------------------------------------------


def test_a_rank_that_left_has_no_weight() -> None:
    case = Case(CoCoD(weights=(3.0, 1.0, 2.5)))
    want = Reference(case, 3, leaves_after=LEAVES_AFTER).run(14)[:, :-1]
    ranks = of_case(others(), "a rank leaves")
    assert_close(ranks[:2], want[:2], TOLERANCE)
    assert_close(ranks[2:], want[2:, :LEAVES_AFTER], TOLERANCE)


def test_weights_are_those_of_a_process_set() -> None:
    options = CoCoD(3, 4, weights=(3.0, 1.0), momentum="average")
    want = expected(Case(options, drains=(13,)), 2)
    assert_close(of_case(others(), "two of three")[:2], want, TOLERANCE)


def test_a_momentum_that_one_rank_has() -> None:
    """Others contribute zeros, from the start of the round before which all have heard of it.

    Rank 1 has it from step 5, the end of the third round; it says so as the fourth starts, so the
    fifth round (steps 8 and 9) is the first that averages it.
    """
    first, second, third = of_case(others(), "a parameter comes to life on one rank")
    assert first == third == [None] * 16
    momenta = [0.0] * 5
    for step, record in enumerate(second[5:], 5):
        assert record is not None
        gradient, momentum = record
        want = 0.9 * momenta[step - 1] + gradient
        if step >= 9 and step % 2 == 1:
            want += momenta[step - 2] / 3 - momenta[step - 2]
        np.testing.assert_allclose(momentum, want, rtol=0, atol=1e-12)
        momenta.append(float(momentum[0]))


@pytest.mark.parametrize("case", ["a parameter joins", "a parameter joins, fp16"])
def test_a_parameter_that_joins_is_averaged_from_the_next_round_on(case: str) -> None:
    """All numbers here are float16's own, so that compression changes nothing."""
    now = [1.0, 1.0, 1.0]
    start = now
    records = []
    for step in range(16):
        if step >= JOINS_AT:
            now = [x - 0.125 * (rank + 1) for rank, x in enumerate(now)]
        if step in (11, 15):
            now = [sum(start) / 3 + (x - begin) for x, begin in zip(now, start, strict=True)]
        if step % 4 == 3:
            start = now
        records.append(now)
    records.append([sum(now) / 3] * 3)
    want = np.array(records).T
    np.testing.assert_allclose(of_case(others(), case), want, rtol=0, atol=TOLERANCE)


def test_a_state_of_another_rule_leaves_nothing_behind() -> None:
    """An anchor was taken for an outer model, and its momentum for one of another sign."""
    for runs in of_case(others(), "other rules"):
        for loaded, fresh in runs:
            np.testing.assert_array_equal(loaded, fresh)


def test_fragments_are_those_of_the_same_parameters() -> None:
    """They were saved by place: in a new process, one that was unfrozen has another place."""
    ranks = of_case(others(), "unfrozen before")
    for straight, resumed, *near in ranks:
        np.testing.assert_allclose(resumed, straight, rtol=0, atol=TOLERANCE)
        for number, one in enumerate(near, start=2):
            assert np.abs(one[-1] - straight[-1]).max() < 0.1
            assert np.array_equal(one[-1], ranks[0][number][-1])


def test_weights_that_do_not_fit() -> None:
    for error in of_case(others(), "wrong number of weights"):
        assert "ValueError: CoCoD has 2 weights, and the process set has 3 ranks" in error
    for error in of_case(others(), "unequal weights"):
        assert error.startswith("RanksDisagreeError: ranks disagree on strategy")
        assert "(3, 2, 1)" in error
        assert "(1, 2, 3)" in error


def test_speeds_are_the_same_list_everywhere() -> None:
    first, *rest = of_case(others(), "speeds")
    assert rest == [first, first]
    assert abs(sum(first) - 3) < 1e-12
    ratios = [first[0] / each for each in first]
    assert ratios == pytest.approx([1, 2, 3])  # 100, 200 and 300 ms


def test_the_example_of_unlike_data(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "torch_examples" / "digits_noniid.py"
    picture = tmp_path / "noniid.png"
    few = ("--steps", "60", "--evaluations", "2", "--learning-rates", "0.05")
    output = run_script(2, str(script), *few, "--plot", str(picture))
    rows = re.findall(r"([^:\s][^:]*?) +0\.05 +([\d.]+)% +[\d.]+$", output, re.MULTILINE)
    assert [name for name, _ in rows] == ["merged-gradient", "cocod", "cocod + pull-back"]
    assert min(float(percent) for _, percent in rows) > 50  # guessing gets 10
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_all_ranks_hear_of_a_step_that_fails() -> None:
    errors = of_case(others(), "a step fails")
    assert errors[1] == "OSError: no data"
    for error in (errors[0], errors[2]):
        assert error.startswith("RuntimeError: the step failed on rank 1")


# Nodes of two ranks, where ranks differ ---------------------------------------------------------


def test_an_overflow_on_one_rank_is_one_on_all_nodes() -> None:
    first, *rest = of_case(nodes(), "overflow")
    assert rest == [first] * 3
    assert first[-1] == 1024.0 / 2 ** len(jobs.OVERFLOWS)


def test_join_does_not_go_with_process_sets() -> None:
    for said in of_case(nodes(), "join"):
        assert said.startswith("HvdPipeError: hvd.join() does not go with within='node'")


def test_a_parameter_that_joins_within_nodes() -> None:
    """All numbers here are exact in float64."""
    now, start = [1.0, 1.0], [1.0, 1.0]
    records = []
    for step in range(16):
        if step >= JOINS_AT:
            now = [x - 0.125 * gradient for x, gradient in zip(now, (1.5, 3.5), strict=True)]
        if step in (11, 15):
            now = [sum(start) / 2 + (x - begin) for x, begin in zip(now, start, strict=True)]
        if step % 4 == 3:
            start = now
        records.append(now)
    records.append([sum(now) / 2] * 2)
    want = np.array(records).T.repeat(PER_NODE, axis=0)
    np.testing.assert_allclose(of_case(nodes(), "a parameter joins"), want, rtol=0, atol=TOLERANCE)


def test_a_state_of_another_number_of_fragments() -> None:
    """What travels is dropped, but nothing is mixed: replicas end equal, and near the others."""
    ranks = of_case(nodes(), "another number of fragments")
    for i in range(4):
        ends = [rank[i][-1] for rank in ranks]
        assert np.isfinite(ends).all()
        assert all(np.array_equal(end, ends[0]) for end in ends)
        assert np.abs(ends[0] - ranks[0][0][-1]).max() < 0.1


def test_bytes_within_a_node_are_not_on_the_wire() -> None:
    for within, plain in of_case(nodes(), "bytes"):
        assert within == plain > 0


def test_a_rank_that_shuts_down_is_told_from_a_mistake_of_this_one() -> None:
    """Horovod removes all process sets then, and raised a ValueError: nobody named that rank."""
    for heard in run_ranks(3, jobs.shut_down_on_one_rank)[:2]:
        assert len(heard) == 7
        for said in heard:
            assert said.startswith("HorovodInternalError: "), said


def test_horovod_must_allow_process_sets_that_come_later() -> None:
    for refused, other in run_ranks(3, jobs.static_sets)[:2]:
        assert refused.startswith('HvdPipeError: within="node" needs a Horovod process set')
        assert 'hvd.init(process_sets="dynamic")' in refused
        assert "within='node' makes process sets of its own" in other


@pytest.mark.parametrize("rank", [1, 2, -1])
def test_ranks_of_all_nodes_hear_of_one_that_synchronizes_alone(rank: int) -> None:
    """One rank of a node, or (-1) the first node as a whole."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(4, jobs.synchronize_alone, rank)
    told = str(caught.value).split("--- rank ")[1:5]
    mine = [0, 1] if rank < 2 else [2, 3]
    for each in mine if rank >= 0 else range(4):
        assert "ranks have sent different things" in told[each], told[each]
