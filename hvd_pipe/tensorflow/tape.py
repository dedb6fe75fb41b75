"""A gradient tape whose gradients are averaged over the workers, for loops of one's own.

A tape lives for one step, and gradients in flight live longer. So this module keeps the sessions:
by the tape's arguments, and then by the list of sources.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average, ProcessSet, global_process_set

from hvd_pipe.strategy import Auto, CoCoD, PipeSGD, Strategy, parse
from hvd_pipe.tensorflow.arguments import TAPE, Arguments
from hvd_pipe.tensorflow.compression import Compression
from hvd_pipe.tensorflow.graphs import check_graph, identity
from hvd_pipe.tensorflow.keras.api import layers_of
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.sessions import Session, Sessions, sources_key
from hvd_pipe.tensorflow.strategies.base import Gradients


class TapeMixin(tf.GradientTape):  # type: ignore[misc]
    """What ``tf.GradientTape`` gains."""

    _hvd_pipe: Sessions
    _hvd_pipe_local: set[int]
    _hvd_pipe_turns: Counter[object]

    def __enter__(self) -> Any:
        self._hvd_pipe_turns.clear()
        return super().__enter__()

    def reset(self) -> None:
        """As ``tf.GradientTape``; the next gradients are another step's."""
        self._hvd_pipe_turns.clear()
        super().reset()

    def register_local_source(self, source: Any) -> None:
        """Do not average a source's gradients over the workers; as Horovod's method."""
        self._hvd_pipe_local.add(identity(source))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """Return the gradients that are due: this step's averages, or last step's (Pipe-SGD).

        Args:
            target, sources, output_gradients, options: As ``tf.GradientTape``. Under Pipe-SGD, if
                a persistent tape computes several gradients of the same sources between two
                recordings, each has an average of its own. Gradients of several tapes do not.
            use_generic_names: Accepted for Horovod's sake: names are generic.
        """
        check_graph()
        eager = tf.executing_eagerly()
        with timeline.active.during("backward") if eager else nullcontext():
            nested = super().gradient(target, sources, output_gradients, **options)
        gradients = _flat(nested, sources)
        session = self._hvd_pipe_session(tf.nest.flatten(sources), gradients)
        due = session.engine.exchange(session.outgoing(gradients))
        session.engine.compare_replicas(due.gradients)
        session.engine.after_step()
        incoming = session.incoming(due.gradients, gradients)
        timeline.end_step()
        return tf.nest.pack_sequence_as(sources, incoming)

    def _hvd_pipe_session(self, sources: Sequence[Any], gradients: Sequence[Any]) -> Session:
        described = [_described(source) for source in sources]
        here = [identity(source) in self._hvd_pipe_local for source in sources]
        pairs = zip(described, here, strict=True)
        local = {identity(source) for source, is_local in pairs if is_local}
        key = sources_key(described)
        turn = 0
        if isinstance(self._hvd_pipe.method, PipeSGD):
            turn = self._hvd_pipe_turns[key]
            self._hvd_pipe_turns[key] += 1
        return self._hvd_pipe.of((key, *here, turn), described, gradients, local)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) pairs of the local sources, and of the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if identity(pair[0]) in self._hvd_pipe_local]
        return local, [pair for pair in pairs if identity(pair[0]) not in self._hvd_pipe_local]


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    strategy: str | Strategy | None = None,
) -> Any:
    """Return the tape with its gradients averaged over the workers.

    Under ``pipe-sgd``, ``gradient()`` returns the averages of the step before, whose messages
    travel behind this step. The first step returns zeros, and your optimizer counts it as a step:
    Adam's bias correction is one step ahead (`DistributedOptimizer` leaves that update out). After
    the last step, ``hvd.drain_gradients(sources)`` returns the gradients that are still in flight,
    for one more ``apply_gradients``. CoCoD averages models, so it needs `DistributedOptimizer`.

    Args:
        gradtape: A ``tf.GradientTape``, before or after it has recorded; it may be persistent.
        device_dense, device_sparse, compression, sparse_as_dense, op: As `DistributedOptimizer`.
        gradient_predivide_factor, num_groups, groups, process_set: As there.
        scale_local_gradients: As there.
        strategy: ``"merged-gradient"`` or ``"pipe-sgd"``, with options as in
            ``"pipe-sgd:warmup_steps=100"``; None takes ``HVD_PIPE_STRATEGY``.

    Raises:
        TypeError, ValueError: An argument has a wrong type or value.
        RanksDisagreeError: Ranks came with different arguments, or one of them failed here.

    Example:
        >>> import hvd_pipe.tensorflow as hvd
        >>> hvd.init()
        >>> w = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = w * w
        >>> tape = hvd.DistributedGradientTape(tape)
        >>> float(tape.gradient(loss, [w])[0])
        6.0
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape must be a tf.GradientTape, got {type(gradtape).__name__}.")
    if isinstance(gradtape, TapeMixin):
        raise ValueError("this tape is distributed already: wrap it once.")
    check_graph()
    parsed = parse(strategy)
    if isinstance(parsed, Auto):
        raise ValueError(
            "strategy='auto' changes the training step once it has measured it, and a tape has no "
            "say in that: use hvd.DistributedOptimizer under model.fit, or give the tape "
            "strategy='merged-gradient' or 'pipe-sgd'."
        )
    if isinstance(parsed, CoCoD):
        raise ValueError(
            "CoCoD averages models, and a tape has gradients only: give strategy='cocod' to "
            "hvd.DistributedOptimizer, with a plain tape."
        )
    if isinstance(parsed, PipeSGD) and parsed.prediction != "none":
        raise ValueError(
            f"prediction={parsed.prediction!r} needs the optimizer, and a tape has gradients "
            "only: give the strategy to hvd.DistributedOptimizer, with a plain tape."
        )
    if num_groups:
        warnings.warn("num_groups is Horovod's old name: use groups", DeprecationWarning, 2)
        groups = num_groups if groups is None else groups
    arguments = Arguments(
        owner=TAPE,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
        strategy=strategy,
    )
    plain: Any = type(gradtape)
    cls = _distributed_class(plain)
    wrapped = cls.__new__(cls)
    wrapped.__dict__ = gradtape.__dict__
    wrapped._hvd_pipe, wrapped._hvd_pipe_local = _sessions(arguments), set()
    wrapped._hvd_pipe_turns = Counter()
    return wrapped


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, *arguments: Any, local_layers: Any = None, **keywords: Any
) -> Any:
    """Return a `DistributedGradientTape` that leaves some layers' gradients on their worker.

    Args:
        gradtape, arguments, keywords: As `DistributedGradientTape`.
        local_layers: A Keras layer, or a list of them.

    Raises:
        TypeError, ValueError: As `DistributedGradientTape`; ``local_layers`` are no built layers.
    """
    layers = layers_of(local_layers)
    tape = DistributedGradientTape(gradtape, *arguments, **keywords)
    for layer in layers:
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape


def drain_gradients(sources: Any) -> Any:
    """Return the averages that a tape's Pipe-SGD still has in flight; call it on all ranks.

    Args:
        sources: The sources that ``tape.gradient`` was given.

    Returns:
        Gradients in the structure of the sources, summed up where a step has computed several.
        None where nothing is in flight, as under merged-gradient: with zeros, an optimizer would
        count one more step, and move by its momentum.

    Example:
        >>> import hvd_pipe.tensorflow as hvd
        >>> w = tf.Variable(3.0)
        >>> hvd.drain_gradients([w]) is None
        True
    """
    key = sources_key(tf.nest.flatten(sources))
    total: list[Any] | None = None
    for sessions in [*_kept.values(), *_grouped.values()]:
        for session in sessions:
            if sources_key(session.variables) != key:
                continue

            def add(due: Gradients, session: Session = session) -> None:
                nonlocal total
                zeros = [tf.zeros(v.shape, v.dtype) for v in session.variables]
                gradients = session.incoming(due, zeros)
                before = total or [0] * len(gradients)
                total = [a + b for a, b in zip(before, gradients, strict=True)]

            session.engine.drain(add)
    return None if total is None else tf.nest.pack_sequence_as(sources, total)


_kept: dict[tuple[object, ...], Sessions] = {}

# Groups name variables, so these last as long as their sessions, which those variables keep.
_grouped: weakref.WeakValueDictionary[tuple[object, ...], Sessions] = weakref.WeakValueDictionary()


def _sessions(arguments: Arguments) -> Sessions:
    """Return what earlier tapes with the same arguments have started."""
    groups = arguments.groups
    kept: MutableMapping[tuple[object, ...], Sessions] = _kept
    if isinstance(groups, list) and all(isinstance(group, list) for group in groups):
        groups, kept = tuple(tuple(map(identity, group)) for group in groups), _grouped
    key = (
        repr(arguments.compression),
        arguments.sparse_as_dense,
        arguments.op,
        arguments.gradient_predivide_factor,
        repr(groups),
        arguments.process_set,
        arguments.device_dense,
        arguments.scale_local_gradients,
        str(parse(arguments.strategy)),
    )
    sessions = kept.get(key)
    if sessions is None:
        kept[key] = sessions = Sessions(arguments, of_tapes=True)
    return sessions


def _described(source: Any) -> Any:
    """Return a variable as it is, and for a tensor what stays the same from step to step."""
    if not isinstance(source, tf.Tensor):
        return source
    if not source.shape.is_fully_defined():
        raise ValueError(
            f"a source of tape.gradient() is a tensor of shape {source.shape}, which is not known "
            "while the step is traced, and a gradient that travels needs its shape: give "
            "tf.function an input_signature with it, or write source = tf.ensure_shape(source, "
            "...) before the tape watches it."
        )
    return tf.TensorSpec(source.shape, source.dtype, "a tensor")


def _flat(gradients: Any, sources: Any) -> list[Any]:
    """Flatten gradients as their sources; a sparse one is a leaf, not a structure."""
    if gradients is None or isinstance(gradients, tf.IndexedSlices):
        return [gradients]
    if isinstance(sources, list | tuple) and isinstance(gradients, list | tuple):
        return list(gradients)
    return list(tf.nest.flatten(gradients))


@functools.cache
def _distributed_class(cls: Any) -> Any:
    return type(cls.__name__, (TapeMixin, cls), {})
