"""``hvd-pipe check``: whether hvd_pipe would help a training script that has never heard of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hvd_pipe import strategy, units
from hvd_pipe.cli import options, script
from hvd_pipe.cli.output import InputError, emit, exposed, note
from hvd_pipe.cli.profile import Target, target_options
from hvd_pipe.measuring.facts import Facts
from hvd_pipe.planning.advise import MARGIN, Row, advise
from hvd_pipe.planning.choice import candidates
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.profile import ModelProfile

STOCK = "horovod"
WORTH, LITTLE = 0.5, 0.15
"""The least m / c at which stock Horovod usually leaves more than a little to gain."""

_NO = "Do not bother:"
_TOO_LARGE = "(!) needs more memory than a worker has."


@click.command(
    cls=script.Command,
    epilog="Examples: hvd-pipe check --workers 64 --bandwidth 10gbit train.py --batch-size 32; "
    "hvd-pipe check --machines 1x8 --inner-bandwidth 300GB/s train.py; "
    "hvd-pipe check --cluster cluster.json nets.py:resnet50 --input 32,3,224,224",
)
@target_options
@options.cluster_options(machines=True)
@options.output_option(".json", what="the profile, for advise, plan and simulate")
@options.json_option
def command(target: Target, cluster: Cluster, path: Path | None, as_json: bool) -> None:
    """Measure SCRIPT_OR_MODEL, and say whether hvd_pipe would help it.

    A script, train.py and its arguments, trains with PyTorch: alone, with DDP or with Horovod. It
    need not import hvd_pipe, and no line of it changes. It is run in one process, as torchrun
    would start it, without input, until 15 steps are made (7 where they take longer than 45
    seconds), and then ended. Run it on the hardware of the job: the faster that computes, the
    more a step waits. Options stand before the script.

    A model of PyTorch or Keras is package.module:factory or file.py:factory, where factory()
    returns it, and --input says what it is fed.

    The network is described (--bandwidth), or measured between its hosts: `horovodrun -np 2 -H
    host1,host2 hvd-pipe bench -o cluster.json`, then --cluster cluster.json. Steps on it are
    predicted.
    """
    if options.job_size() > 1:
        raise InputError("a script is checked in one process: run this without a launcher")
    profile, facts = target.measure()
    if profile is None:
        assert facts is not None
        _refuse(target, facts, as_json=as_json)
        return
    if path is not None:
        profile.save(path)
    _print(profile, facts, cluster, path, as_json=as_json)


def _refuse(target: Target, facts: Facts, *, as_json: bool) -> None:
    """Say that parameters are divided over workers."""
    said = (
        f"{_NO} {target.target} divides its parameters or the optimizer's state over workers "
        f"({facts.sharded}). hvd_pipe averages the gradients of whole replicas."
    )
    if as_json:
        emit({"command": "check", "worth_it": False, "verdict": said}, (), {}, as_json=True)
    else:
        note(said)


def _print(
    profile: ModelProfile,
    facts: Facts | None,
    cluster: Cluster,
    path: Path | None,
    *,
    as_json: bool,
) -> None:
    ratio = facts.state_ratio if facts is not None else 1.0
    answer = _answer(profile, cluster, ratio)
    size, seconds = int(profile.gradient_bytes().sum()), units.format_seconds
    emit(
        options.document("check", profile, cluster, **answer, facts=facts and asdict(facts)),
        answer["rows"],
        {
            "strategy~": _label,
            "step": "step_s",
            "waits": lambda row: exposed(row["exposed_s"], row["step_s"]),
            "times\nstock": lambda row: f"{row['speedup']:.2f}",
            "updates~": "updates",
            "memory": "memory_bytes",
        },
        as_json=as_json,
        above=(
            f"{profile.name}: {units.format_bytes(size)} of gradients{_how_measured(facts)}",
            f"c = {seconds(profile.compute_s)}, a step of one worker that sends nothing "
            f"(medians): {seconds(profile.forward_s)} before the first gradient (data, forward), "
            f"{seconds(profile.backward_s)} from there to the last, "
            f"{seconds(profile.update_s)} until the update is made",
            f"m = {seconds(answer['all_reduce_s'])}, one all-reduce of all gradients. "
            f"{options.describe(cluster)}",
            f"m / c = {answer['ratio']:.2g}",
        ),
        below=(
            "Steps are predicted. PyTorch DDP takes about as long as stock Horovod. Memory is "
            "that of trained weights, their gradients, the optimizer's state"
            f"{'' if facts else ' (as with momentum)'} and messages, without activations.",
            *([_TOO_LARGE] if not all(row["usable"] for row in answer["rows"]) else []),
            *([f"Wrote {path}. Give advise --optimizer-state {ratio:g} with it."] if path else []),
            answer["verdict"],
        ),
    )


def _how_measured(facts: Facts | None) -> str:
    """Say what was measured, and how much steps differed."""
    if facts is None:
        return ""
    text = f", {facts.optimizer} on {facts.device}"
    if facts.range_s is not None:
        least, most = map(units.format_seconds, facts.range_s)
        text += f"; steps took {least} to {most}"
    return f"{text}; {facts.caveats}" if facts.caveats else text


def _answer(profile: ModelProfile, cluster: Cluster, state_ratio: float) -> dict[str, Any]:
    """Return c, m, what to expect of stock Horovod and of each strategy, and the verdict."""
    size = int(profile.gradient_bytes().sum())
    c, m = profile.compute_s, float(cluster.comm()(size)) if cluster.workers > 1 else 0.0
    merged, pipe, rounds = candidates(profile, cluster.comm())
    methods = (merged, strategy.MergedGradient(overlap="forward"), pipe, rounds)
    advice = advise(profile, cluster, methods, optimizer_ratio=state_ratio)
    stock = next(row for row in advice.rows if row.time.method == STOCK)
    rows = [row for row in advice.rows if not row.baseline]
    rows.sort(key=lambda row: (not row.exact, not row.identical, row.strategy))
    one_machine = 1 < cluster.workers <= cluster.network.per_node
    worth_it, said = verdict(m / c, stock, rows, one_machine=one_machine)
    if cluster.workers == 1:
        worth_it, said = False, f"{_NO} one worker sends nothing."
    table = [_document(row, stock) for row in (stock, *rows)]
    numbers = {"compute_s": c, "all_reduce_s": m, "ratio": m / c}
    return {**numbers, "rows": table, "worth_it": worth_it, "verdict": said}


def _document(row: Row, stock: Row) -> dict[str, Any]:
    return {
        "strategy": STOCK if row is stock else row.strategy,
        "step_s": row.time.total_s,
        "exposed_s": row.time.exposed_s,
        "speedup": _speedup(row, stock),
        "updates": _updates(row),
        "memory_bytes": row.memory_bytes,
        "usable": row.usable,
    }


def _label(row: Mapping[str, Any]) -> str:
    """Return a strategy's name where a line has little room."""
    name = str(row["strategy"])
    label = "stock Horovod" if name == STOCK else name.removeprefix("merged-gradient:")
    return label if row["usable"] else f"{label} (!)"


def _updates(row: Row) -> str:
    """Say what a strategy changes in the updates."""
    if row.exact:
        return "exact"
    if row.identical:
        return "gradients one step old"
    method = strategy.parse(row.strategy)
    assert isinstance(method, strategy.CoCoD)
    return f"averaged every {method.period} steps"


def _speedup(row: Row, stock: Row) -> float:
    return stock.time.total_s / row.time.total_s


def verdict(
    ratio: float, stock: Row, rows: Sequence[Row], *, one_machine: bool
) -> tuple[bool, str]:
    """Return whether hvd_pipe is worth a try, and why, in a sentence or two.

    Args:
        ratio: m / c.
        stock, rows: What is predicted of stock Horovod, and of hvd_pipe's strategies.
        one_machine: Whether all workers are in one.
    """
    usable = [row for row in rows if row.usable]
    if not usable:
        return False, f"{_NO} no strategy fits into a worker's memory."
    fastest = min(usable, key=lambda row: row.time.total_s)
    default, forward = (row for row in rows if row.exact)
    # What asks more of a script than the default has to be faster.
    exact = default if default.time.total_s < 1.01 * forward.time.total_s else forward
    of_exact, of_fastest = _speedup(exact, stock), _speedup(fastest, stock)
    expected = f"{exact.strategy}, which is exact, {of_exact:.2f} times"
    if of_fastest > 1.01 * of_exact:
        expected += (
            f", and {fastest.strategy}, which changes the updates and may cost accuracy, "
            f"{of_fastest:.2f} times"
        )
    expected = f"Expected speed, as a multiple of stock Horovod's: {expected}."
    if ratio < WORTH and of_fastest <= 1.0 + LITTLE:
        where = "all workers are in one machine, and " if one_machine else ""
        waits = stock.time.exposed_s / stock.time.total_s
        return False, (
            f"{_NO} {where}an all-reduce takes {ratio:.2g} times as long as a step computes, less "
            f"than {WORTH:g}. Stock Horovod waits for {waits:.0%} of a step. {expected}"
        )
    if of_fastest <= 1.0 + MARGIN:
        return False, f"{_NO} no strategy gains more than {MARGIN:.0%}. {expected}"
    if of_exact <= 1.0 + MARGIN:
        return True, f"Only strategies that change the updates help. {expected}"
    return True, f"It is worth a try. {expected}"
