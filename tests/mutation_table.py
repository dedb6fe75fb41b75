"""The faults that mutations.py plants, and the tests that should notice each.

Anchors are short: what they replace must be once in the file, also after the next change of it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

__all__ = ["MUTATIONS", "Mutation"]


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Args:
        name: What is wrong, in a few words.
        file: In ``hvd_pipe``.
        old: Text that is in the file once.
        new: What stands there with the fault.
        tests: The smallest tests that should notice, as words of a pytest command line.
        cases: Which cases of a job they need, as a pattern (see `cases.run_cases`); all by
            default.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    cases: str = ""


def _ids(file: str, *names: str) -> str:
    return " ".join(shlex.quote(f"tests/{file}.py::{name}") for name in names)


def _equation(*cells: str) -> str:
    return _ids("parallel/test_equations", *(f"test_trajectory[2-{cell}]" for cell in cells))


def _cocod(*cells: str) -> str:
    return _ids("parallel/test_cocod_options", *(f"test_trajectory[2-{cell}]" for cell in cells))


def _keras(*cells: str) -> str:
    return _ids("parallel/test_keras_equations", *(f"test_trajectory[2-{cell}]" for cell in cells))


def _features(*names: str) -> str:
    return _ids("parallel/test_keras_features", *names)


def _forward(name: str) -> str:
    return _ids("parallel/test_keras_forward", name)


def _merged(case: str) -> str:
    return _ids("parallel/test_merged_gradient", f"test_equal_to_stock_horovod[{case}]")


def _overlapped(*cases: str) -> str:
    tests = (f"test_equal_to_stock_horovod[{case}]" for case in cases)
    return _ids("parallel/test_overlap_forward", *tests)


def _piped(*names: str) -> str:
    tests = (f"test_pipelines_are_their_equations[{name}]" for name in names)
    return _ids("parallel/test_pipedream", *tests)


def _by_hand(case: str) -> str:
    return _ids("parallel/test_keras_pipedream", f"test_stages_by_hand_are_the_equation[{case}]")


def _exchange(name: str) -> str:
    return _ids("parallel/test_exchange", f"{name}[2_gloo]")


_GATED = "plain, wfbp, slow network"
_BACK = "test_the_barrier_comes_back_where_its_steps_were_faster"
_LOOK = "parallel/test_overlap_forward", "test_who_looks_early_sees_new_weights"
_PIPE = "pipe-sgd, momentum"
_DRAINED = "pipe-sgd, momentum, drained after (13, 14)"
_RACE = "test_plans_are_tried_and_nothing_is_lost_on_the_way"
_K_PIPE = "'fit', 'pipe-sgd', 'momentum'"
_K_COCOD = "'fit', 'cocod:period=4', 'momentum'"

_TORCH = [
    Mutation(
        "a module raises on ranks alone (shows that ranks import the copy)",
        "torch/strategies/pipe_sgd.py",
        '__all__ = ["PipeSGDEngine"]\n',
        '__all__ = ["PipeSGDEngine"]\n'
        "import os\n"
        'if "OMPI_COMM_WORLD_RANK" in os.environ:\n'
        '    raise RuntimeError("planted")\n',
        _equation(_PIPE),
        "^pipe-sgd, momentum$",
    ),
    Mutation(
        "Pipe-SGD: gradients are stale by two",
        "torch/strategies/pipe_sgd.py",
        "        self._wait(due)\n        self.current = due\n",
        "        self._wait(due)\n"
        "        now = [p.grad.clone() for p in self.settings.parameters]\n"
        "        for p, old in zip(self.settings.parameters, getattr(self, '_late', now)):\n"
        "            p.grad.copy_(old)\n"
        "        self._late = now\n"
        "        self.current = due\n",
        _equation(_PIPE),
        "^pipe-sgd, momentum$",
    ),
    Mutation(
        "Pipe-SGD: the warm-up is a step too long",
        "torch/strategies/pipe_sgd.py",
        "if self.rounds < self._warmup_steps:",
        "if self.rounds <= self._warmup_steps:",
        _equation("pipe-sgd:warmup_steps=5, momentum"),
        "^pipe-sgd:warmup_steps=5, momentum$",
    ),
    Mutation(
        "Pipe-SGD: the last gradient is never applied",
        "torch/strategies/pipe_sgd.py",
        "        self.settings.owner.update()\n",
        "",
        _equation(_DRAINED),
        "^pipe-sgd, momentum, drained",
    ),
    Mutation(
        "Pipe-SGD: the last gradient is applied twice",
        "torch/strategies/pipe_sgd.py",
        "        self.settings.owner.update()\n",
        "        self.settings.owner.update()\n        self.settings.owner.update()\n",
        _equation(_DRAINED),
        "^pipe-sgd, momentum, drained",
    ),
    Mutation(
        "Pipe-SGD: a buffer is written while it is in flight",
        "torch/strategies/pipe_sgd.py",
        "self.current = self._sets[self.current is self._sets[0]]",
        "self.current = self._sets[self.current is not self._sets[0]]",
        _equation(_PIPE),
        "^pipe-sgd, momentum$",
    ),
    Mutation(
        "Pipe-SGD: a rank drains without meeting the others",
        "torch/strategies/pipe_sgd.py",
        "            self.next_message.meet()\n",
        "",
        _ids(
            "parallel/test_guards", "test_ranks_that_drain_at_different_steps_are_told[pipe-sgd]"
        ),
    ),
    Mutation(
        "Pipe-SGD: the pending gradient of a checkpoint is dropped",
        "torch/strategies/pipe_sgd.py",
        "restore_gradients(self._pending, saved.pending)",
        "pass",
        _ids(
            "parallel/test_guards",
            "test_a_loaded_state_goes_on_with_what_it_holds[pipe-sgd-in flight]",
        ),
        "in flight",
    ),
    Mutation(
        "Pipe-SGD: a late gradient is divided by another step's loss scale",
        "torch/strategies/pipe_sgd.py",
        "return None if self._shown is None else self._scales.get(self._shown)",
        "return None",
        _ids("parallel/test_uses", "test_cell[GradScaler, one rank overflows-pipe-sgd]"),
        "'GradScaler, one rank overflows', 'pipe-sgd'",
    ),
    Mutation(
        "prediction: the true weights do not come back",
        "torch/strategies/prediction.py",
        "        torch._foreach_copy_(self._values(), self._true)\n",
        "",
        _ids("parallel/test_prediction", "test_trajectory[previous, momentum, warm-up 0]"),
        "^previous, momentum, warm-up 0$",
    ),
    Mutation(
        "prediction: the guess keeps its loss scale",
        "torch/strategies/prediction.py",
        "gradient if gradient is None or scale == 1.0 else gradient / scale",
        "gradient",
        _ids("parallel/test_prediction", "test_a_guess_has_its_own_loss_scale[local]"),
        "^scaled local$",
    ),
    Mutation(
        "MG-WFBP: a change of the order does not lead to a new plan",
        "torch/strategies/merged_gradient.py",
        "if isinstance(phase, Planned) and self._flags.reordered != 0.0:",
        "if False:",
        _ids("parallel/test_plans", "test_another_order_of_gradients_leads_to_another_plan"),
    ),
    Mutation(
        "MG-WFBP: each rank plans from its own ready times, not the slowest rank's",
        "torch/strategies/merged_gradient.py",
        'largest(mine, f"{settings.tag}.ready", process_set)',
        "list(mine)",
        _ids("parallel/test_plans", "test_the_slowest_ranks_times_count"),
    ),
    Mutation(
        "trials: the slowest plan stays",
        "planning/trials.py",
        "min(tried, key=lambda each: each.step_s)",
        "max(tried, key=lambda each: each.step_s)",
        _ids("single/test_trials", "test_the_fastest_stays_whatever_was_expected_of_it"),
    ),
    Mutation(
        "trials: of three plans, the best one is not tried",
        "planning/trials.py",
        "if len(tried) < 3:",
        "if len(tried) < most - 1:",
        _ids(
            "single/test_trials",
            "test_where_trials_are_dear_the_best_plan_is_the_last_to_be_tried",
        ),
    ),
    Mutation(
        "trials: Keras takes the best plan unraced",
        "tensorflow/strategies/replan.py",
        "PLANS = 3",
        "PLANS = 2",
        _ids(
            "parallel/test_keras_auto",
            "test_the_plan_that_the_slowest_rank_is_fastest_with_stays",
        ),
    ),
    Mutation(
        "trials: under Keras, a wait is that of the rank that waits longest",
        "tensorflow/strategies/replan.py",
        "*(-wait for wait in times.waits)",
        "*(wait for wait in times.waits)",
        _ids(
            "parallel/test_keras_auto",
            "test_a_wait_is_the_median_of_what_the_last_rank_waits_in_each_step",
        ),
    ),
    Mutation(
        "keras overlap: late updates take the rate of the step that makes them",
        "tensorflow/keras/late_updates.py",
        "(_iterations=past, _learning_rate=lambda: rate)",
        "(_iterations=past)",
        _forward("test_what_it_trains_ends_as_with_the_barrier[rates]"),
        cases="^rates",
    ),
    Mutation(
        "keras overlap: late updates count on from the step that makes them",
        "tensorflow/keras/late_updates.py",
        "Past(tf.cast(iterations, kept[",
        "Past(tf.cast(iterations + 1, kept[",
        _forward("test_it_ends_as_with_the_barrier_bit_for_bit[adam]"),
        cases="^adam",
    ),
    Mutation(
        "keras overlap: messages leave as they are ready",
        "tensorflow/strategies/forward_overlap.py",
        "self._sent[-2:-1]",
        "[]",
        _forward("test_a_layer_waits_for_its_own_messages_alone"),
        cases="^waits",
    ),
    Mutation(
        "keras overlap: a checkpoint is read without what is pending",
        "tensorflow/strategies/forward_overlap.py",
        "self._held = {i: tf.constant(each, dtypes[i]) for i, each in found.items()}",
        "self._held = {}",
        _forward("test_a_checkpoint_has_what_is_still_to_come"),
        cases="^saved$",
    ),
    Mutation(
        "keras overlap: the barrier stays where it was slower",
        "tensorflow/strategies/replan.py",
        "if step_s < before:",
        "if step_s > before:",
        _forward("test_what_was_faster_on_the_slowest_rank_stays"),
        cases="^tried",
    ),
    Mutation(
        "keras overlap: a rank defers whatever others have found",
        "tensorflow/strategies/replan.py",
        "problems = [each for each in found if each is not None]",
        "problems = [problem] if problem else []",
        _forward("test_the_barrier_stays_with_the_reason[one rank]"),
        cases="^one rank",
    ),
    Mutation(
        "keras overlap: late weights are left as they are under checks",
        "tensorflow/strategies/forward_overlap.py",
        "if self._leaves() is graph:",
        "if False:",
        _forward("test_under_check_mode_a_read_that_is_too_early_is_nan"),
        cases="^checked$",
    ),
    Mutation(
        "keras overlap: a step may use weights after their update",
        "tensorflow/strategies/forward_overlap.py",
        "self.read_after_update = self.settings.shapes.names[index]",
        "pass",
        _forward("test_the_barrier_stays_with_the_reason[used after]"),
        cases="^used after$",
    ),
    Mutation(
        "keras: a step whose data has run out decays weights",
        "tensorflow/keras/optimizer.py",
        "tf.control_dependencies(data_of_step())",
        "tf.control_dependencies([])",
        _forward("test_a_step_whose_data_has_run_out_changes_no_weights[merged-gradient]"),
        cases="^unknown length$",
    ),
    Mutation(
        "keras overlap: an epoch ends where batches are as many as steps",
        "tensorflow/keras/callbacks.py",
        "batch + 1 >= (self.params",
        "batch + 1 == (self.params",
        _forward("test_a_callback_before_ours_reads_whole_weights[ends, executions]"),
        cases="^ends, executions$",
    ),
    Mutation(
        "keras overlap: training that stops within an epoch leaves late updates",
        "tensorflow/keras/callbacks.py",
        "if self.model.stop_training or batch",
        "if batch",
        _forward("test_a_callback_before_ours_reads_whole_weights[ends, stopped]"),
        cases="^ends, stopped$",
    ),
    Mutation(
        "keras overlap: after an exception, a call of fit seems to go on",
        "tensorflow/keras_patches.py",
        "each._hvd_pipe.watcher.takes(None)",
        "pass",
        _forward("test_steps_after_an_exception_that_ends_fit_are_whole"),
        cases="^exception$",
    ),
    Mutation(
        "keras overlap: a step may use weights after their update, once a plan defers",
        "tensorflow/keras/late_updates.py",
        "if engine.defers and found is not None:",
        "if False:",
        _forward("test_a_second_model_keeps_the_barrier[second averages-a step uses]"),
        cases="^second averages$",
    ),
    Mutation(
        "keras overlap: a clipping of one's own sees the gradients of a part",
        "tensorflow/keras/late_updates.py",
        '    "_clip_gradients",\n',
        "",
        _forward("test_the_barrier_stays_with_the_reason[own clipping]"),
        cases="^own clipping$",
    ),
    Mutation(
        "keras overlap: variables that are no longer trained go on sending",
        "tensorflow/strategies/forward_overlap.py",
        "return self.defers and not self._is_idle",
        "return self.defers",
        _forward("test_variables_that_are_no_longer_trained_send_nothing_more"),
        cases="^frozen later$",
    ),
    Mutation(
        "keras overlap: tensors of messages are kept",
        "tensorflow/strategies/forward_overlap.py",
        "self._updated, self._sent = lambda: None, []",
        "self._updated = lambda: None",
        _forward("test_tensors_of_messages_are_not_kept"),
        cases="^frozen later$",
    ),
    Mutation(
        "keras pipe-sgd: a tape applies a gradient in a step without data",
        "tensorflow/strategies/pipe_sgd.py",
        "with tf.control_dependencies(data_of_step()):",
        "if True:",
        _forward("test_a_step_whose_data_has_run_out_changes_no_weights[tape]"),
        cases="^unknown length$",
    ),
    Mutation(
        "keras overlap: steps outside of fit leave messages to the next one",
        "tensorflow/keras/late_updates.py",
        "if watcher is None or not watcher.is_driven:",
        "if watcher is None:",
        _forward("test_a_step_that_no_call_of_fit_watches_is_whole"),
        cases="^unwatched$",
    ),
    Mutation(
        "keras overlap: a resumed run races again",
        "tensorflow/strategies/forward_overlap.py",
        "self.has_saved_plan = True",
        "pass",
        _forward("test_a_run_that_is_resumed_goes_on_with_the_plan_that_stayed"),
        cases="^tried, faster",
    ),
    Mutation(
        "keras overlap: a commit holds each rank's own gradient",
        "tensorflow/elastic.py",
        "            _finish_late()\n        self._keep()",
        "            pass\n        self._keep()",
        _forward("test_a_commit_has_the_gradients_of_all_ranks"),
        cases="^committed$",
    ),
    Mutation(
        "keras overlap: ranks do not compare what they have loaded",
        "tensorflow/messages/meeting.py",
        "if (found % reduction.workers).any():",
        "if False:",
        _forward("test_a_checkpoint_that_one_rank_alone_loads_between_calls_is_an_error_on_all"),
        cases="^loaded alone between$",
    ),
    Mutation(
        "keras overlap: a rank asks a process set that it is not in",
        "tensorflow/strategies/replan.py",
        "if not (each.settings.reduction.alone or each.plan is None or each.plan.order is None)",
        "if not (each.plan is None or each.plan.order is None)",
        _forward("test_a_rank_outside_of_the_process_set_is_not_asked"),
        cases="^two of three$",
    ),
    Mutation(
        "keras overlap: a trial goes on whatever callbacks do",
        "tensorflow/strategies/replan.py",
        "if (self._barriers or not self._open) and",
        "if not self._open and",
        _forward("test_a_trial_does_not_go_on_beside_a_callback_that_saves"),
        cases="^saver in a trial$",
    ),
    Mutation(
        "keras overlap: a trial that has ended ends again",
        "tensorflow/strategies/replan.py",
        "self._barriers.pop(number)",
        "self._barriers[number]",
        _forward("test_a_trial_ends_once"),
        cases="^ended twice$",
    ),
    Mutation(
        "keras overlap: a trial lasts no longer for a warm-up",
        "tensorflow/keras/late_updates.py",
        "optimizer._hvd_pipe.watcher.delay()",
        "pass",
        _forward("test_a_warm_up_finishes_updates_for_velocities_alone"),
        cases="^warm-up",
    ),
    Mutation(
        "keras overlap: eager steps apply gradients of unfinished weights",
        "tensorflow/keras/late_updates.py",
        "if tf.executing_eagerly() and engine.holds:",
        "if False:",
        _forward("test_a_step_without_a_graph_asks_for_what_a_checkpoint_holds"),
        cases="^resumed eagerly$",
    ),
    Mutation(
        "keras overlap: a timeline lacks late messages",
        "tensorflow/measuring/timeline.py",
        "    begun.__enter__()\n",
        "",
        _ids(
            "parallel/test_keras_timeline",
            "test_messages_behind_the_next_forward_pass_are_shown_in_its_step",
        ),
        cases="^forward$",
    ),
    Mutation(
        "keras overlap: what is needed first is late as well",
        "planning/deferral.py",
        "return len(plan.order) - plan.order[::-1].index(len(plan.buckets) - 1)",
        "return plan.order.index(len(plan.buckets) - 1)",
        _ids("single/test_deferral", "test_what_may_arrive_after_the_next_forward_pass_has_begun"),
    ),
    Mutation(
        "trials: a message costs no latency",
        "planning/trials.py",
        "self.lead_s + latency * self.counts + per_byte * self.bytes",
        "self.lead_s + per_byte * self.bytes",
        _ids("single/test_trials", "test_a_burst_and_a_message_alone_are_told_apart"),
    ),
    Mutation(
        "trials: no plan is worth a trial",
        "planning/trials.py",
        "first.wait_s <= HIDDEN * first.step_s",
        "first.wait_s <= first.step_s",
        _ids(
            "single/test_trials", "test_the_plan_that_stays_is_as_good_as_if_the_link_were_known"
        ),
    ),
    Mutation(
        "pipe-sgd's race: the most messages win ties",
        "planning/trials.py",
        "key=lambda each: (len(each.plan.buckets), each.step_s)",
        "key=lambda each: (-len(each.plan.buckets), each.step_s)",
        _ids("single/test_trials", "test_the_fewest_messages_win_a_race_within_the_error"),
    ),
    Mutation(
        "pipe-sgd's race: each rank goes by its own times",
        "torch/strategies/pipe_sgd.py",
        'largest(race.seconds(), f"{tag}.steps", process_set)',
        "race.seconds()",
        _ids("parallel/test_pipe_sgd", f"{_RACE}[1 stay]"),
        "race', '1 stay'",
    ),
    Mutation(
        "pipe-sgd's race: a rank that has joined is asked",
        "torch/strategies/pipe_sgd.py",
        "if not sent.mean_flags().all_present(self.reduction.workers):",
        "if False:",
        _ids("parallel/test_pipe_sgd", "test_a_rank_that_has_joined_is_not_asked"),
        "race', 'joins'",
    ),
    Mutation(
        "pipe-sgd's race: residuals stay behind in the buckets before",
        "torch/strategies/pipe_sgd.py",
        "restore_residuals(renewed, left)",
        "pass",
        _ids("parallel/test_pipe_sgd", "test_what_int8_has_lost_survives_a_change_of_buckets"),
        "race', 'int8'",
    ),
    Mutation(
        "pipe-sgd's race: what is in flight is forgotten with its buckets",
        "torch/strategies/pipe_sgd.py",
        "            self._outdated = set(self._sets)\n",
        "            return self._adopt(plan)\n",
        _ids("parallel/test_pipe_sgd", f"{_RACE}[drained]"),
        "race', 'drained'",
    ),
    Mutation(
        "pipe-sgd's plan: as many messages as are as good",
        "planning/pipelined.py",
        "(len(each.plan.buckets), each.uneven_s)",
        "(-len(each.plan.buckets), each.uneven_s)",
        _ids("single/test_pipelined", "test_away_from_r_1_a_message_is_enough"),
    ),
    Mutation(
        "pipe-sgd's plan: steps are taken for even",
        "planning/pipelined.py",
        "delay, UNEVEN)",
        "delay, 0.0)",
        _ids(
            "single/test_pipelined",
            "test_at_r_1_messages_leave_earlier_so_that_uneven_steps_cost_less",
        ),
    ),
    Mutation(
        "the plan of the last rank is used, not that of the first",
        "runtime/consensus.py",
        "value if process_set.rank() == 0 else None, name, process_set)[0]",
        "value if process_set.rank() == 0 else None, name, process_set)[-1]",
        _ids("parallel/test_plans", "test_all_ranks_have_the_same_plan_at_the_same_step[even]"),
    ),
    Mutation(
        "a bucket is never sent",
        "torch/messages/buckets.py",
        "        self.message.launch()\n",
        '        if not self.name.endswith(".1"):\n            self.message.launch()\n',
        _equation("merged-gradient:plan=wfbp, momentum"),
        "^merged-gradient:plan=wfbp, momentum$",
    ),
    Mutation(
        "a rank that waits takes a core",
        "torch/messages/pending.py",
        "            _sleep_until_arrived(handle)\n",
        "",
        _ids("parallel/test_waiting", "test_waiting_takes_no_processor[gloo]"),
    ),
    Mutation(
        "the last bucket is not waited for",
        "torch/messages/buckets.py",
        "for bucket in reversed(self.buckets):\n            bucket.wait()",
        "for bucket in self.buckets:\n            bucket.launched = False\n"
        "            bucket.waiting = len(bucket.views)\n"
        "            bucket._filled_version = None\n"
        "        for bucket in self.buckets[:-1]:\n            bucket.wait()",
        _equation("merged-gradient:plan=wfbp, momentum"),
        "^merged-gradient:plan=wfbp, momentum$",
    ),
    Mutation(
        "a gradient that was not computed keeps its old value",
        "torch/messages/allreduce.py",
        "    if gradient is None:\n        view.zero_()\n    elif",
        "    if gradient is None:\n        pass\n    elif",
        _merged("a head that only some ranks use"),
        "^a head that only some",
    ),
    Mutation(
        "the control word for ranks that have left is ignored",
        "torch/messages/control_flags.py",
        "return self.present > 1 - 0.5 / workers",
        "return True",
        _ids(
            "parallel/test_guards",
            "test_a_rank_that_has_joined_is_not_averaged_in_as_a_model[pipe-sgd]",
            "test_a_rank_that_has_joined_is_not_averaged_in_as_a_model[merged-gradient]",
        ),
        "joined",
    ),
    Mutation(
        "the control word for frozen parameters is ignored",
        "torch/messages/buckets.py",
        "if self.flags.frozen != 0.0:",
        "if False:",
        _ids("parallel/test_regressions", "test_a_parameter_frozen_on_one_rank[pipe-sgd]"),
        "frozen alone",
    ),
    Mutation(
        "the control word for sparse gradients is ignored",
        "torch/messages/buckets.py",
        "if self.flags.sparse != 0.0:",
        "if False:",
        _ids("parallel/test_uses", "test_cell[sparse gradients-pipe-sgd]"),
        "'sparse gradients', 'pipe-sgd'",
    ),
    Mutation(
        "gradients that are changed while they are sent go unnoticed",
        "torch/messages/buckets.py",
        "        self._check_untouched(complete)\n",
        "",
        _ids("parallel/test_regressions", "test_training_goes_on_after_a_refused_step[pipe-sgd]"),
        "goes on",
    ),
    Mutation(
        "a residual is dropped where buckets change",
        "torch/messages/saved.py",
        "                    view.copy_(saved)\n",
        "                    pass\n",
        _ids(
            "parallel/test_resume",
            "test_each_rank_goes_on_from_its_own_file"
            "[merged-gradient, momentum, int8 with feedback, saved after 7-2]",
        ),
        "own file: merged-gradient, momentum, int8 with feedback, saved after 7",
    ),
    Mutation(
        "the wrong divisor: predivided and not multiplied back",
        "torch/messages/allreduce.py",
        "postscale_factor=factor,",
        "postscale_factor=1.0,",
        _merged("predivide"),
        "^predivide$",
    ),
    Mutation(
        "op=Sum averages",
        "torch/messages/allreduce.py",
        "            op=self.op,\n",
        "            op=Average,\n",
        _merged("sum"),
        "^sum$",
    ),
    Mutation(
        "what came in float16 is not copied back",
        "torch/messages/allreduce.py",
        "            self._flat.copy_(self._reduction.compression.decompress(self._wire, "
        "self._context))\n",
        "            pass\n",
        _merged("fp16"),
        "^fp16$",
    ),
    Mutation(
        "sparse gradients are added up, not averaged",
        "torch/messages/sparse.py",
        "values = values / self._reduction.workers",
        "pass",
        _ids("parallel/test_uses", "test_cell[sparse gradients-merged-gradient]"),
        "'sparse gradients', 'merged-gradient'",
    ),
    Mutation(
        "CoCoD: the sign of the progress is turned",
        "torch/strategies/model_average.py",
        "self._mean.sub_(self._start)",
        "self._mean.mul_(-1.0).add_(self._start).mul_(1.0)",
        _equation("cocod:period=4, momentum"),
        "^cocod:period=4, momentum$",
    ),
    Mutation(
        "CoCoD: a round is a step too long",
        "torch/strategies/cocod.py",
        "if self._local_steps < (self._turn + 1) * self._strategy.turn:",
        "if self._local_steps <= (self._turn + 1) * self._strategy.turn:",
        _equation("cocod:period=4, momentum"),
        "^cocod:period=4, momentum$",
    ),
    Mutation(
        "CoCoD: a rank's own weight is ignored",
        "torch/messages/allreduce.py",
        "return mine * len(self.weights) / sum(self.weights)",
        "return 1.0",
        _cocod("weights=(3.0, 1.0, 2.5), momentum, none, float64"),
        r"^weights=.*momentum, none, float64$",
    ),
    Mutation(
        "CoCoD: a replica that has left still counts",
        "torch/strategies/model_average.py",
        "there = (self._present * size).round_()",
        "there = torch.ones_like(self._present) * size / len(self._present)",
        _ids("parallel/test_cocod_options", "test_a_rank_that_left_has_no_weight"),
        "^a rank leaves$",
    ),
    Mutation(
        "CoCoD: the anchor does not move",
        "torch/strategies/model_average.py",
        "        self._anchor.add_(self._velocity)\n",
        "",
        _cocod("pull_back=0.6, anchor_momentum=0.7, momentum, none, float64"),
        r"^pull_back=0.6, anchor_momentum=0.7, momentum, none, float64",
    ),
    Mutation(
        "CoCoD: the outer optimizer forgets its momentum",
        "torch/strategies/model_average.py",
        "self._velocity.mul_(momentum).add_(change)",
        "self._velocity.copy_(change)",
        _cocod("outer=nesterov, outer_lr=0.3, outer_momentum=0.6, momentum, none, float64"),
        r"^outer=nesterov, outer_lr=0.3, outer_momentum=0.6, momentum, none, float64",
    ),
    Mutation(
        "CoCoD: the first fragment travels in every turn",
        "torch/strategies/cocod.py",
        "self._turn = (self._turn + 1) % self._strategy.fragments",
        "self._turn = 0",
        _cocod("fragments=2, momentum, none, float64"),
        r"^fragments=2, momentum, none, float64",
    ),
    Mutation(
        "CoCoD: a node's gradients are averaged over all ranks",
        "torch/strategies/within_node.py",
        "process_set=node,",
        "process_set=world,",
        _ids(
            "parallel/test_cocod_options",
            "test_workers_of_a_node_stay_equal[3-within=node, momentum, none, float64]",
        ),
        r"^within=node, momentum, none, float64",
    ),
    Mutation(
        "CoCoD: momenta are not averaged",
        "torch/strategies/cocod.py",
        """for part in self._parts if part.fragment == self._turn)
        if self._momenta is not None:
            yield from self._momenta.averages""",
        """for part in self._parts if part.fragment == self._turn)
        if self._momenta is not None:
            yield from ()""",
        _cocod("momentum=average, momentum, none, float64"),
        r"^momentum=average, momentum, none, float64",
    ),
    Mutation(
        "CoCoD: second moments may become negative",
        "torch/strategies/model_average.py",
        "value.clamp_(min=0.0)",
        "pass",
        _cocod("momentum=average, hasty adam, none, float64, drained after (13, 14)"),
        "hasty",
    ),
    Mutation(
        "CoCoD: a round ends before its average is there",
        "torch/strategies/model_average.py",
        "        self.complete()\n        self.due = False\n        if self._rule",
        "        self.due = False\n        if self._rule",
        _equation("cocod:period=4, momentum"),
        "^cocod:period=4, momentum$",
    ),
    Mutation(
        "CoCoD: compressed differences are taken from an old average",
        "torch/strategies/model_average.py",
        "            self._base = _copy(self._mean, self._base)\n        if self._rule",
        "            self._base = self._mean.clone() if self._base is None else self._base\n"
        "        if self._rule",
        _ids(
            "parallel/test_cocod_options",
            "test_differences_are_what_float16_rounds"
            "[2-momentum, fp16, float64, drained after (13,)]",
        ),
        "^momentum, fp16",
    ),
    Mutation(
        "CoCoD: BatchNorm's statistics are not averaged",
        "torch/strategies/cocod.py",
        'self._buffers.average(reduction, f"{tag}.buffers")',
        "pass",
        _ids("parallel/test_cocod", "test_they_are_equal_to_the_mean[2-a model]"),
        "^a model$",
    ),
]

_CODECS = [
    Mutation(
        "int8 truncates in place of rounding",
        "torch/compression.py",
        "rows.div_(scale).round_()",
        "rows.div_(scale).trunc_()",
        _ids("single/test_compression", "test_int8_is_wrong_by_half_a_scale_at_most"),
    ),
    Mutation(
        "int8 hides an overflow",
        "torch/compression.py",
        ".add_(peak.mul_(0.0))",
        "",
        _ids(
            "single/test_compression",
            "test_int8_keeps_an_overflow_in_its_chunk",
            "test_an_overflow_arrives",
        ),
    ),
    Mutation(
        "error feedback: what a message has lost is not added to the next",
        "torch/messages/compressed_allreduce.py",
        "                lost.add_(value)\n",
        "                lost.copy_(value)\n",
        _exchange("test_two_exchanges_share_a_feedback"),
        "shared",
    ),
    Mutation(
        "error feedback: what the sum has lost is not added to the next",
        "torch/messages/compressed_allreduce.py",
        "            lost.add_(piece)\n",
        "            lost.copy_(piece)\n",
        _exchange("test_two_exchanges_share_a_feedback"),
        "shared",
    ),
    Mutation(
        "error feedback: an overflow stays for ever",
        "torch/messages/compressed_allreduce.py",
        "            lost.nan_to_num_(0.0, 0.0, 0.0)\n",
        "            pass\n",
        _ids(
            "parallel/test_exchange",
            "test_an_overflow_on_one_rank_is_one_on_all"
            "[Int8(chunk=256, error_feedback=True)-inf-2_gloo]",
        ),
        "not finite",
    ),
    Mutation(
        "control words that travel with a code are added up, not averaged",
        "torch/messages/compressed_allreduce.py",
        "return total.div_(len(words)) if self._reduction.op == Average else total",
        "return total",
        _exchange("test_control_words_are_exact"),
        "256",
    ),
    Mutation(
        "Keras: int8 rounds down",
        "tensorflow/compression.py",
        "tf.round(chunks / scale)",
        "tf.floor(chunks / scale)",
        _features("test_coded_averages_are_those_of_two_phases"),
        "^coded$",
    ),
    Mutation(
        "Keras: a residual is dropped",
        "tensorflow/messages/reduction.py",
        "    rows = rows + lost\n",
        "",
        _features("test_coded_averages_are_those_of_two_phases"),
        "^coded$",
    ),
    Mutation(
        "Keras: coded gradients are added up, not averaged",
        "tensorflow/messages/reduction.py",
        "        own = own / workers\n",
        "        pass\n",
        _features("test_coded_averages_are_those_of_two_phases"),
        "^coded$",
    ),
]

_TENSORFLOW = [
    Mutation(
        "Keras: Pipe-SGD is not late",
        "tensorflow/strategies/pipe_sgd.py",
        "outgoing = [each.read_value() for each in self._pending]",
        "outgoing = list(fresh)",
        _keras("fit-pipe-sgd-momentum"),
        _K_PIPE,
    ),
    Mutation(
        "Keras: Pipe-SGD's first step applies a gradient of zeros",
        "tensorflow/strategies/pipe_sgd.py",
        "when = was_pending if warm is None else tf.logical_or(warm, was_pending)",
        "when = None",
        _keras("fit-pipe-sgd-adam"),
        "'fit', 'pipe-sgd', 'adam'",
    ),
    Mutation(
        "Keras: the last gradient is never applied",
        "tensorflow/strategies/pipe_sgd.py",
        "            update(due)\n",
        "            pass\n",
        _keras("fit-pipe-sgd-momentum"),
        _K_PIPE,
    ),
    Mutation(
        "Keras: the warm-up is a step too long",
        "tensorflow/strategies/pipe_sgd.py",
        "warm = self._rounds < self._warmup_steps",
        "warm = self._rounds <= self._warmup_steps",
        _keras("fit-pipe-sgd:warmup_steps=5-momentum"),
        "'fit', 'pipe-sgd:warmup_steps=5', 'momentum'",
    ),
    Mutation(
        "Keras: prediction keeps the optimizer's changed state",
        "tensorflow/strategies/pipe_sgd.py",
        "            each.assign(value)\n",
        "            pass\n",
        _keras("fit-pipe-sgd:prediction=local-momentum"),
        "'fit', 'pipe-sgd:prediction=local', 'momentum'",
    ),
    Mutation(
        "Keras: a bucket is never averaged",
        "tensorflow/strategies/merged_gradient.py",
        'reduction.reduce(flat, f"{tag}.gradients.{i}", feedback)',
        'reduction.reduce(flat, f"{tag}.gradients.{i}", feedback) if i else flat',
        _keras("fit-merged-gradient:plan=wfbp-momentum"),
        "'fit', 'merged-gradient:plan=wfbp', 'momentum'",
    ),
    Mutation(
        "Keras: rows of an embedding are added up, not averaged",
        "tensorflow/messages/reduction.py",
        "values = parts[0] / self.workers if self.op == Average else parts[0]",
        "values = parts[0]",
        _features("test_rows_of_an_embedding_are_averaged[sparse-False]"),
        "embedding",
    ),
    Mutation(
        "Keras: predivided and not multiplied back",
        "tensorflow/messages/reduction.py",
        "postscale_factor=factor,",
        "postscale_factor=1.0,",
        _features("test_arguments_mean_what_they_mean_to_horovod[predivide-1.5-1]"),
        "update predivide",
    ),
    Mutation(
        "Keras: CoCoD's progress has the wrong sign",
        "tensorflow/strategies/model_average.py",
        "m + (x - s) for",
        "m - (x - s) for",
        _keras("fit-cocod:period=4-momentum"),
        _K_COCOD,
    ),
    Mutation(
        "Keras: CoCoD's rounds are a step too long",
        "tensorflow/strategies/cocod.py",
        "tf.equal(counted % self._turn, 0)",
        "tf.equal(counted % (self._turn + 1), 0)",
        _keras("fit-cocod:period=4-momentum"),
        _K_COCOD,
    ),
    Mutation(
        "Keras: CoCoD's snapshot is taken a step late",
        "tensorflow/strategies/cocod.py",
        "tf.equal(self._local_steps, 0))",
        "tf.equal(self._local_steps, 1))",
        _keras("fit-cocod:period=4-momentum"),
        _K_COCOD,
    ),
    Mutation(
        "Keras: momenta are not averaged",
        "tensorflow/strategies/cocod.py",
        "self._parts.append(momenta)",
        "pass",
        _keras("fit-cocod:period=4,momentum=average-momentum"),
        "'fit', 'cocod:period=4,momentum=average', 'momentum'",
    ),
    Mutation(
        "Keras: the anchor does not move",
        "tensorflow/strategies/model_average.py",
        "self._anchor = [z + v for z, v in",
        "self._anchor = [z for z, v in",
        _keras("fit-cocod:period=3,pull_back=0.6,anchor_momentum=0.7-momentum"),
        "'fit', 'cocod:period=3,pull_back=0.6,anchor_momentum=0.7', 'momentum'",
    ),
    Mutation(
        "Keras: the outer optimizer forgets its momentum",
        "tensorflow/strategies/model_average.py",
        "self._velocity = [momentum * u + d for u, d in",
        "self._velocity = [d for u, d in",
        _keras("fit-cocod:period=3,outer=nesterov,outer_lr=0.3,outer_momentum=0.6-momentum"),
        "'fit', 'cocod:period=3,outer=nesterov,outer_lr=0.3,outer_momentum=0.6', 'momentum'",
    ),
    Mutation(
        "Keras: a rank's own weight is ignored",
        "tensorflow/messages/reduction.py",
        "float(mine * len(self.weights) / sum(self.weights))",
        "mine / mine",
        _keras("fit-cocod:period=3,warmup_steps=4,weights=3/1-momentum"),
        "weights=3/1",
    ),
    Mutation(
        "Keras: a fragment travels behind a whole period",
        "tensorflow/strategies/cocod.py",
        "= strategy.turn, strategy.fragments",
        "= strategy.period, strategy.fragments",
        _keras("fit-cocod:period=4,fragments=2-momentum"),
        "'fit', 'cocod:period=4,fragments=2', 'momentum'",
    ),
    Mutation(
        "Keras: gradients of a node are averaged over all ranks",
        "tensorflow/strategies/cocod.py",
        '_within_node(settings, strategy) if strategy.within == "node" else None',
        'self._everyone if strategy.within == "node" else None',
        _ids(
            "parallel/test_keras_equations",
            "test_trajectory[4-fit-cocod:period=4,fragments=4,within=node-momentum]",
        ),
        "'fit', 'cocod:period=4,fragments=4,within=node', 'momentum'",
    ),
    Mutation(
        "Keras: second moments may become negative",
        "tensorflow/strategies/model_average.py",
        "tf.maximum(x, 0) if clamp else x",
        "x",
        _keras("fit-cocod:period=5,momentum=average-forgetful"),
        "'fit', 'cocod:period=5,momentum=average', 'forgetful'",
    ),
]

_PIPEDREAM = [
    Mutation(
        "PipeDream: weights of the newest version in place of the stashed",
        "torch/pipedream/weights.py",
        "zip(self.parameters, self._values[version], strict=True)",
        "zip(self.parameters, self._values[self._newest], strict=True)",
        _piped("1-1-1 stash momentum"),
        "^1-1-1 stash momentum$",
    ),
    Mutation(
        "PipeDream: backward runs with whatever weights are there",
        "torch/pipedream/stage.py",
        "        self.versions.use(version)\n        if pending.loss is not None:",
        "        if pending.loss is not None:",
        _piped("1-1-1 stash momentum"),
        "^1-1-1 stash momentum$",
    ),
    Mutation(
        "PipeDream: an update overwrites weights that are still needed",
        "pipeline/executor.py",
        "if last_uses.get(newest, -1) > at:",
        "if False:",
        _piped("1-1-1 stash momentum"),
        "^1-1-1 stash momentum$",
    ),
    Mutation(
        "PipeDream: a stage's gradient is not sent",
        "torch/pipedream/stage.py",
        "pending.entered[at] if at in pending.entered else torch.zeros_like(pending.inputs[at])",
        "torch.zeros_like(pending.inputs[at])",
        _piped("1-1-1 stash momentum"),
        "^1-1-1 stash momentum$",
    ),
    Mutation(
        "PipeDream: microbatches do not weigh by their samples",
        "torch/pipedream/stage.py",
        "pending.loss = loss if weight == 1.0 else loss * weight",
        "pending.loss = loss",
        _piped("1-1 2bw momentum"),
        "^1-1 2bw momentum$",
    ),
    Mutation(
        "PipeDream: the average counts replicas that had no minibatch",
        "torch/pipedream/weights.py",
        "factor = self._replicas.size() / contributors",
        "factor = 1.0",
        _piped("2-1 stash momentum"),
        "^2-1 stash momentum$",
    ),
    Mutation(
        "PipeDream: a learning rate counts updates, not minibatches",
        "torch/pipedream/weights.py",
        "for _ in range(self._minibatches):",
        "for _ in range(1):",
        _ids(
            "parallel/test_pipedream_options",
            "test_options_are_in_the_equations[2-1 by minibatch]",
        ),
        "2-1 by minibatch",
    ),
    Mutation(
        "PipeDream: bfloat16 is asked for, and float32 travels",
        "torch/pipedream/tensors.py",
        'device="cpu", dtype=dtype)',
        'device="cpu")',
        _ids(
            "parallel/test_pipedream_options",
            "test_bfloat16_on_the_wire_rounds_at_the_cuts[1-1 stash]",
        ),
        "1-1 stash",
    ),
    Mutation(
        "PipeDream: stages that read other minibatches go unnoticed",
        "torch/pipedream/stage.py",
        "            _check_digest(pending.digest, microbatch.digest, index)\n",
        "",
        _ids(
            "parallel/test_pipedream_wrong",
            "test_minibatches_that_cannot_be"
            "[order-2-the first and the last stage read different minibatches]",
        ),
    ),
    Mutation(
        "PipeDream: a microbatch in the place of another goes unnoticed",
        "pipeline/messages.py",
        "if (header.minibatch, header.microbatch) != index:",
        "if False:",
        _ids("parallel/test_keras_pipedream", "test_a_message_of_another_microbatch_is_refused"),
    ),
    Mutation(
        "PipeDream: norms of other stages do not travel",
        "pipeline/wire.py",
        '.view("<f8")[:] = header.squared_norms\n',
        '.view("<f8")[:] = 0.0\n',
        _ids("single/test_pipeline_wire", "test_what_is_packed_is_unpacked"),
    ),
    Mutation(
        "PipeDream: norms are heard of the wrong side",
        "pipeline/norms.py",
        "(squared, self.squared) if from_before else (self.squared, squared)",
        "(self.squared, squared) if from_before else (squared, self.squared)",
        _ids(
            "parallel/test_pipedream_clipping",
            "test_stages_clip_by_the_newest_norms_that_they_have_heard_of",
        ),
    ),
    Mutation(
        "PipeDream: replicas' norms are counted once each",
        "pipeline/norms.py",
        "self.add(own / width,",
        "self.add(own,",
        _ids("single/test_pipeline_norms", "test_stages_that_update_together_add_up"),
    ),
    Mutation(
        "Keras PipeDream: forward with the newest version",
        "tensorflow/pipedream/stage.py",
        "        weights = self._versions[version]\n        with tf.GradientTape(",
        "        weights = self._versions[max(self._versions)]\n"
        "        self._versions[version] = weights\n"
        "        with tf.GradientTape(",
        _by_hand("2bw-4-2-momentum-False"),
    ),
    Mutation(
        "Keras PipeDream: the newest microbatch's gradient replaces the sum",
        "tensorflow/pipedream/stage.py",
        "gradient = [a + b for a, b in zip(self._gradient, gradient, strict=True)]",
        "pass",
        _by_hand("flush-4-2-momentum-False"),
    ),
    Mutation(
        "Keras PipeDream: microbatches do not weigh by their samples",
        "tensorflow/pipedream/stage.py",
        "pending.share = self._read(index).share",
        "pass",
        _by_hand("flush-4-2-momentum-False"),
    ),
]

_PLANNER = [
    Mutation(
        "merge: the dynamic program forgets a place to begin",
        "planning/merge.py",
        "        first = free + 1\n",
        "        first = free + 2\n",
        _ids("single/test_merge", "test_exact_is_the_best_of_all_plans"),
    ),
    Mutation(
        "merge: a message need not wait for its last gradient",
        "planning/merge.py",
        "best = max(finish[free], ready[j - 1]) + comm(",
        "best = max(finish[free], ready[j - 2]) + comm(",
        _ids("single/test_merge", "test_exact_is_the_best_of_all_plans"),
    ),
    Mutation(
        "merge: coalescing does not move the deadline",
        "planning/merge.py",
        "        deadline -= cost[first]\n",
        "",
        _ids("single/test_merge", "test_coalescing_costs_nothing"),
    ),
    Mutation(
        "merge: a bucket may be a tensor larger than its limit",
        "planning/merge.py",
        "        if more > room:\n",
        "        if room <= 0:\n",
        _ids("single/test_merge", "test_by_bytes"),
    ),
    Mutation(
        "fit: the slope is that of another line",
        "planning/samples.py",
        "/ (weights @ (x - x_mean) ** 2)",
        "/ (weights @ x**2)",
        _ids("single/test_fit", "test_fit_takes_the_best_of_what_is_allowed"),
    ),
    Mutation(
        "fit: errors are absolute, so that small messages do not count",
        "planning/fit.py",
        "for sample in samples]) / times**2",
        "for sample in samples])",
        _ids("single/test_fit", "test_fit_finds_the_line_under_noise_and_outliers"),
    ),
    Mutation(
        "fit: an outlier bends the line",
        "planning/fit.py",
        "huber = limit / np.maximum(residual, limit)",
        "huber = np.ones_like(base)",
        _ids("single/test_fit", "test_fit_is_robust_where_an_outlier_is_the_median_of_its_size"),
    ),
    Mutation(
        "comm: scaled bytes keep their slope",
        "planning/comm.py",
        "seconds_factor * bytes_factor * value for",
        "seconds_factor * value for",
        _ids("single/test_comm", "test_scaled_is_the_formula"),
    ),
    Mutation(
        "comm: a codec's second phase has no delay",
        "planning/comm.py",
        "delay=phases * self.delay",
        "delay=self.delay",
        _ids("single/test_comm", "test_the_delay_goes_along"),
    ),
    Mutation(
        "comm: what is ready later is negotiated together with what came before",
        "planning/comm.py",
        "ready[len(ends)] <= looks",
        "ready[len(ends)] <= free",
        _ids("single/test_timing", "test_where_one_thread_negotiates_and_carries"),
    ),
    Mutation(
        "merge: a plan for a blocking backend takes messages for as cheap as in a burst",
        "planning/merge.py",
        "slow = comm.each_alone()",
        "slow = comm",
        _ids("single/test_merge", "test_a_blocking_delay_is_in_every_message_of_a_plan"),
    ),
    Mutation(
        "schedule: 1F1B takes a version too new",
        "planning/schedule.py",
        "return max(0, unit // width - warm)",
        "return max(0, unit // width - warm + 1)",
        _ids("single/test_schedule", "test_equations_of_a_straight_pipeline"),
    ),
    Mutation(
        "schedule: minibatches in transit are forgotten",
        "planning/schedule.py",
        " + in_transit * (len(replicas) - 1 - stage)",
        "",
        _ids("single/test_schedule", "test_each_boundary_adds_what_is_in_transit"),
    ),
    Mutation(
        "in transit: more than the plan needs",
        "planning/in_transit.py",
        "if run.period_s <= plan.period_s / REACHED:",
        "if False:",
        _ids("single/test_in_transit", "test_none_is_in_transit_where_messages_cost_nothing"),
    ),
    Mutation(
        "in transit: the memory of a worker is exceeded",
        "planning/in_transit.py",
        "while in_transit is None and count and _exceeds(cluster, cost):",
        "while False:",
        _ids("single/test_in_transit", "test_memory_decides_how_many"),
    ),
    Mutation(
        "in transit: what was simulated is simulated again",
        "planning/in_transit.py",
        "period_s=periods[count] if count < len(periods) else None",
        "period_s=None",
        _ids("single/test_in_transit", "test_no_number_is_simulated_twice"),
    ),
    Mutation(
        "in transit: a saved plan keeps its old memory",
        "pipeline/plans.py",
        "in_transit in (None, given.in_transit):",
        "True:",
        _ids("single/test_pipeline_plans", "test_a_saved_plan_has_the_memory_of_its_number"),
    ),
    Mutation(
        "in transit: the engine's schedule has none",
        "pipeline/runner.py",
        "self._in_transit = assignment.partition.in_transit",
        "self._in_transit = 0",
        _ids(
            "parallel/test_pipedream", "test_pipelines_are_their_equations[1-1 stash in_transit=2]"
        ),
    ),
    Mutation(
        "pipeline plans: the best on paper is taken, however it runs",
        "planning/pipeline_plans.py",
        "near = (found for found in offers if found.period_s <= fastest_s() / REACHED)",
        "near = offers[:1]",
        _ids("single/test_in_transit", "test_the_plan_is_the_fastest_as_it_runs"),
    ),
    Mutation(
        "schedule: GPipe's backward passes go first to last",
        "planning/schedule.py",
        "for k in reversed(range(count)))",
        "for k in range(count))",
        _ids("single/test_schedule", "test_doctests"),
    ),
    Mutation(
        "schedule: 2BW is not late",
        "planning/schedule.py",
        "return max(0, unit // microbatches - 1)",
        "return max(0, unit // microbatches)",
        _ids("single/test_schedule", "test_equation_of_two_bw"),
    ),
    Mutation(
        "schedule: a short last round has no update on the replica without a minibatch",
        "planning/instructions.py",
        "    if updates < rounds:\n",
        "    if False:\n",
        _ids(
            "single/test_schedule",
            "test_a_short_last_round_gives_all_replicas_equally_many_updates",
        ),
    ),
    Mutation(
        "partition: the all-reduce is charged n, not n - 1 times",
        "planning/_search.py",
        "allreduce = 2 * (r - 1) / r * parameters",
        "allreduce = 2 * parameters",
        _ids("single/test_partition", "test_best_of_a_chain"),
    ),
    Mutation(
        "partition: minibatches in flight are rounded down",
        "planning/partition.py",
        "held = -(-behind // leaf.replicas)",
        "held = behind // leaf.replicas",
        _ids("single/test_partition", "test_best_of_a_chain"),
    ),
    Mutation(
        "balance: what rounding leaves goes to who lost least",
        "planning/balance.py",
        "(result[i] - exact[i], i)",
        "(exact[i] - result[i], i)",
        _ids("single/test_balance", "test_within_one_of_the_exact_share", "test_doctests"),
    ),
    Mutation(
        "stability: momentum makes Pipe-SGD bear more",
        "planning/stability.py",
        "return 1.0 - momentum",
        "return 1.0 + momentum",
        _ids("single/test_methods", "test_stability_is_what_was_measured"),
    ),
    Mutation(
        "stability: CoCoD's replicas are those of Local SGD",
        "planning/stability.py",
        "return rest @ (steps - averaged), rest @ steps",
        "return rest @ steps, rest @ steps",
        _ids("single/test_methods", "test_limits_of_cocod"),
    ),
]

_OVERLAP = [
    Mutation(
        "overlap: the order of a plan is ignored",
        "torch/messages/ordered.py",
        "            for bucket in self._order:\n",
        "            for bucket in sorted(self._order):\n",
        _ids("single/test_ordered", "test_buckets_leave_in_the_order_of_the_plan"),
    ),
    Mutation(
        "overlap: messages leave as they are ready",
        "torch/messages/ordered.py",
        "return self._left in self._ready and len(",
        "return bool(self._ready) and len(",
        _ids("single/test_ordered", "test_nothing_overtakes_what_is_not_ready"),
    ),
    Mutation(
        "overlap: one message more is on the wire",
        "torch/messages/ordered.py",
        "len(self._flying) < IN_FLIGHT",
        "len(self._flying) <= IN_FLIGHT",
        _ids("single/test_ordered", "test_few_are_on_the_wire_at_a_time"),
    ),
    Mutation(
        "overlap: a piece ends one element early",
        "torch/messages/ordered.py",
        "part = slice(start, end + exact if last else end)",
        "part = slice(start, end + exact if last else end - 1)",
        _ids("single/test_ordered", "test_pieces"),
    ),
    Mutation(
        "overlap: updates go by the options of now",
        "torch/partial_updates.py",
        "{**group, **taken, ",
        "{**taken, **group, ",
        _ids("single/test_partial_updates", "test_updates_of_some_are_one_update_of_all"),
    ),
    Mutation(
        "overlap: the barrier never comes back",
        "torch/overlap_start.py",
        "if min(each for messages, each in before if messages == count) <= seconds:",
        "if False:",
        _ids("parallel/test_overlap_forward", _BACK),
        "barrier wins",
    ),
    Mutation(
        "overlap: a resumed run races again",
        "torch/overlap_start.py",
        "self._over = plan.order is None and bool(plan.tried_forward)",
        "self._over = False",
        _ids("parallel/test_overlap_forward", _BACK),
        "barrier wins",
    ),
    Mutation(
        "overlap: a gate lets everything pass",
        "torch/strategies/forward_overlap.py",
        "            self._apply({self._bucket_of[index] for index in indices})\n",
        "            pass\n",
        _overlapped(_GATED),
        _GATED,
    ),
    Mutation(
        "overlap: what was applied is applied again",
        "torch/strategies/forward_overlap.py",
        "self._pending = [number for number in self._pending if number not in due]",
        "self._pending = list(self._pending)",
        _overlapped(_GATED),
        _GATED,
    ),
    Mutation(
        "overlap: the control flags are not read",
        "torch/strategies/forward_overlap.py",
        "            self._receive()\n",
        "            self.current.wait()\n",
        _ids("parallel/test_overlap_forward", "test_a_rank_that_synchronizes_alone_is_told"),
        "apart",
    ),
    Mutation(
        "overlap: a copy of a module does not wait",
        "torch/strategies/forward_overlap.py",
        "            copy_first(module)\n",
        "",
        _ids(_LOOK[0], f"{_LOOK[1]}[copy of a part]"),
        "copy of a part",
    ),
    Mutation(
        "overlap: an optimizer that goes out of scope takes its last update along",
        "torch/strategies/forward_overlap.py",
        "        _unfinished[self] = self.settings.owner.itself()\n",
        "",
        _ids(
            "parallel/test_overlap_forward",
            "test_an_optimizer_that_goes_out_of_scope_makes_its_last_update",
        ),
        "let_go",
    ),
    Mutation(
        "overlap: what most steps use outside of modules is waited for in them",
        "torch/measuring/first_uses.py",
        "if 2 * count > self.steps}",
        "if count > self.steps}",
        _ids("single/test_first_uses", "test_what_is_read_now_and_then"),
    ),
    Mutation(
        "overlap: what is needed last is sent first",
        "planning/overlap.py",
        "key=lambda i: (needed_s[i], i))",
        "key=lambda i: (-needed_s[i], i))",
        _ids("single/test_overlap", "test_what_is_needed_first_beats_first_in_first_out"),
    ),
    Mutation(
        "overlap: the first step, which waits for nothing, stands for all",
        "planning/overlap.py",
        "STEPS = 6",
        "STEPS = 1",
        _ids("single/test_overlap", "test_a_step_is_that_of_a_simulation_of_events"),
    ),
    Mutation(
        "overlap: a timeline does not show what a gate waits for",
        "torch/strategies/forward_overlap.py",
        "trace.waited(begun, bucket.name)",
        "pass",
        _ids(
            "parallel/test_running_timeline",
            "test_forward_passes_wait_at_their_gates_and_steps_do_not",
        ),
    ),
    Mutation(
        "overlap: the sender looks for what is ready before it takes the lock to sleep",
        "torch/messages/ordered.py",
        "        with self._changed:  # what becomes ready may leave at once\n"
        "            if not (self._closed or self._may_send()):\n",
        "        if not (self._closed or self._may_send()):\n            with self._changed:\n",
        _ids(
            "single/test_ordered",
            "test_a_message_that_is_ready_as_the_thread_falls_asleep_leaves[True]",
        ),
    ),
    Mutation(
        "overlap: rank 0's own steps decide which plan stays",
        "torch/overlap_start.py",
        '(seconds,) = largest([mine], f"{tag}.trial", process_set)',
        "seconds = mine",
        _ids(
            "parallel/test_overlap_forward",
            "test_ranks_with_unlike_times_keep_the_plan_of_the_slowest_ones",
        ),
        "timed unlike",
    ),
    Mutation(
        "overlap: a simulated worker waits at its last gate alone",
        "planning/_overlap_run.py",
        "for message in gates:",
        "for message in gates[-1:]:",
        _ids("single/test_simulate", "test_every_worker_waits_at_its_gates"),
    ),
    Mutation(
        "auto: all weights are needed at the end of what comes before backward",
        "planning/overlap.py",
        "return [sum(seconds) * part / sum(parts) for part in parts]",
        "return seconds",
        _ids("single/test_choice", "test_forward_is_taken_to_be_spread_as_backward_is"),
    ),
    Mutation(
        "auto: overlap=forward goes before plain merged-gradient",
        "planning/choice.py",
        "(*_EXACT, PipeSGD(), CoCoD())",
        "(*_EXACT[::-1], PipeSGD(), CoCoD())",
        _ids("single/test_choice", "test_what_is_not_simpler_must_be_faster_by_the_margin"),
    ),
    Mutation(
        "auto: a rank leaves overlap=forward out by itself",
        "torch/auto_choice.py",
        "_without_forward(self._candidates) if unfit else self._candidates",
        "fitting",
        _ids(
            "parallel/test_auto",
            "test_overlap_forward_is_left_out_where_one_rank_would_not_defer",
        ),
        "forward, refused on one rank",
    ),
    Mutation(
        "auto: all messages are taken for NCCL's",
        "runtime/comm_probe.py",
        "blocking=bool(blocking)",
        "blocking=False",
        _ids(
            "single/test_profiler",
            "test_messages_are_blocking_unless_nccl_carries_them_everywhere",
        ),
    ),
    Mutation(
        "auto: each rank has its own model of messages",
        "runtime/comm_probe.py",
        "sender.largest([float(not sender.uses_nccl())])",
        "[float(not sender.uses_nccl())]",
        _ids("parallel/test_measuring", "test_all_ranks_find_the_same_times"),
    ),
    Mutation(
        "auto: pipe-sgd keeps the size that was predicted to be best, and tries no plans",
        "torch/auto_choice.py",
        "replace(found.method, bucket_bytes=None)",
        "replace(found.method)",
        _ids("parallel/test_auto", "test_pipe_sgd_that_was_chosen_tries_its_plans"),
        "^race$",
    ),
    Mutation(
        "auto: steps on trial are reported as what was reached",
        "torch/auto_choice.py",
        "settled = not engine.measures and",
        "settled =",
        _ids("parallel/test_auto", "test_pipe_sgd_that_was_chosen_tries_its_plans"),
        "^race$",
    ),
    Mutation(
        "auto: a resumed run has no plan of overlap=forward",
        "torch/auto_choice.py",
        "(engine, saved) if self._overlap is None else self._overlap.resume(engine, saved)",
        "engine, saved",
        _ids(
            "parallel/test_auto",
            "test_a_resumed_run_goes_on_with_overlap_forward_and_its_plan[forward, resumed]",
        ),
        "forward, resumed$",
    ),
]

MUTATIONS: list[Mutation] = [
    *_TORCH,
    *_OVERLAP,
    *_CODECS,
    *_TENSORFLOW,
    *_PIPEDREAM,
    *_PLANNER,
]
