"""What `hvd_pipe.tensorflow.keras` defines: `DistributedOptimizer`, `load_model`, collectives."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as _horovod
import keras
import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average, ProcessSet, global_process_set

from hvd_pipe.strategy import Strategy
from hvd_pipe.tensorflow.arguments import Arguments
from hvd_pipe.tensorflow.compression import Compression
from hvd_pipe.tensorflow.keras.optimizer import distribute


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    strategy: str | Strategy | None = None,
) -> Any:
    """Return the Keras optimizer with its gradients (or models) averaged over the workers.

    With n workers, g_i worker i's gradient and x_i its model::

        merged-gradient   w[t+1] = w[t] - lr * mean_i g_i(w[t])
        pipe-sgd          w[t+1] = w[t] - lr * mean_i g_i(w[t-1])
        cocod             x_i[s+1] = mean_j x_j[s] + (x_i after k local steps - x_i[s])

    The result is an instance of a subclass of ``type(optimizer)`` and shares its iterations,
    slots and options. It works in ``model.fit``, in custom training steps and in eager loops:
    wherever Keras' ``apply`` or ``apply_gradients`` is called. Models are saved with the plain
    optimizer, and load without hvd_pipe; `load_model` distributes a loaded one. ``fit`` ends with
    ``synchronize()``; call that yourself at the end of a loop of your own.

    Args:
        optimizer: Any ``keras.optimizers.Optimizer``; a LossScaleOptimizer must wrap the result.
        name: Accepted for Horovod's sake: messages have names of their own.
        device_dense: Where dense gradients are reduced, such as ``"/gpu:0"``.
        device_sparse: Accepted for Horovod's sake: sparse ones stay where they are.
        compression: ``none``, ``fp16``, ``bf16`` or ``int8`` of ``hvd.Compression``,
            ``hvd.Int8(error_feedback=True)``, or any Horovod compressor.
        sparse_as_dense: Send sparse gradients as dense ones, as ``pipe-sgd`` does anyway.
        gradient_predivide_factor: Divide by this factor before the sum, by n / factor after it.
        op: ``hvd.Average``, or ``hvd.Sum`` except with CoCoD.
        backward_passes_per_step: Passes (minibatches) whose gradients are summed into one.
        average_aggregated_gradients: Whether that sum is divided by the number of passes.
        num_groups: Horovod's older name for an int ``groups``.
        groups: Lists of variables that share a message, or a number of messages.
        process_set: The workers that take part.
        scale_local_gradients: Whether gradients of local variables are divided by n.
        strategy: ``"merged-gradient"``, ``"pipe-sgd"``, ``"cocod"``, one of these with options as
            in ``"cocod:period=8"``, or a strategy object; None takes ``HVD_PIPE_STRATEGY``.
            ``"auto"`` measures and chooses, under ``model.fit`` with
            `callbacks.BroadcastGlobalVariablesCallback`.

    Raises:
        TypeError, ValueError: An argument has a wrong type or value, before training starts.
        RanksDisagreeError: Ranks came with different arguments, or one of them failed here.

    Example:
        >>> import hvd_pipe.tensorflow.keras as hvd
        >>> hvd.init()
        >>> opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="pipe-sgd")
        >>> isinstance(opt, keras.optimizers.SGD)
        True
    """
    if num_groups:
        warnings.warn("num_groups is Horovod's old name: use groups", DeprecationWarning, 2)
        groups = num_groups if groups is None else groups
    passes = backward_passes_per_step
    accumulation_steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if passes != 1 and accumulation_steps:
        raise ValueError(
            f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps="
            f"{accumulation_steps} both sum up gradients: give one of them."
        )
    arguments = Arguments(
        owner=f"the optimizer {type(optimizer).__name__}",
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
        backward_passes_per_step=passes,
        average_aggregated_gradients=average_aggregated_gradients,
        accumulation_steps=accumulation_steps,
    )
    return distribute(optimizer, arguments)


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *arguments: Any, local_layers: Any = None, **keywords: Any
) -> Any:
    """Return a `DistributedOptimizer` that does not average the gradients of local layers.

    Local layers may have other shapes on each worker. Each worker applies its own gradients to
    them, and keeps its own moving averages, such as BatchNormalization's.

    Args:
        optimizer, arguments, keywords: As `DistributedOptimizer`.
        local_layers: A Keras layer that has been built, or a list of them.

    Raises:
        TypeError, ValueError: As `DistributedOptimizer`; ``local_layers`` are no built layers.
        RanksDisagreeError: As `DistributedOptimizer`.

    Example:
        >>> import hvd_pipe.tensorflow.keras as hvd
        >>> hvd.init()
        >>> table = keras.layers.Embedding(8, 2)
        >>> table.build(None)
        >>> opt = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=table)
    """
    layers = layers_of(local_layers)
    distributed = DistributedOptimizer(optimizer, *arguments, **keywords)
    for layer in layers:
        for weight in layer.weights:
            distributed.register_local_var(weight)
    return distributed


def layers_of(local_layers: Any) -> list[Any]:
    """Return the layers that a user calls local."""
    layers = local_layers if isinstance(local_layers, list | tuple) else [local_layers]
    layers = [layer for layer in layers if layer is not None]
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError(f"local_layers must be Keras layers, got {local_layers!r}.")
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise ValueError(
            f"the layer {unbuilt[0]!r} of local_layers has no variables yet: build it, or its "
            "model, first."
        )
    return layers


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a Keras model and distribute its optimizer; iterations and slots are kept.

    Args:
        filepath: A ``.keras`` or ``.h5`` file, made with or without hvd_pipe.
        custom_optimizers: Optimizer classes of your own that the file names.
        custom_objects: As Keras' ``load_model``.
        compression: As `DistributedOptimizer`.
        legacy_opts: Accepted for Horovod's sake: Keras 3 has none.
        options: More of `DistributedOptimizer`'s arguments, such as ``strategy``.

    Returns:
        The model, compiled as it was saved, with the distributed optimizer.

    Raises:
        ValueError: The file has no compiled optimizer.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            f"{filepath} was saved without an optimizer: load it with keras.models.load_model, "
            "and compile it with hvd.DistributedOptimizer(...)."
        )
    scaler = optimizer if hasattr(optimizer, "inner_optimizer") else None
    inner = optimizer if scaler is None else scaler.inner_optimizer
    distributed = DistributedOptimizer(inner, compression=compression, **options)
    if scaler is None:
        model.optimizer = distributed
    else:
        scaler.inner_optimizer = distributed
    model.jit_compile = False  # XLA cannot compile Horovod's messages
    model.train_function = None
    return model


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of all ranks' values; arguments as Horovod's.

    Example:
        >>> float(allreduce(2.0))
        2.0
    """
    return _value(
        _horovod.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
            op=op,
            compression=compression,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Return all ranks' values, one after the other along the first dimension."""
    return _value(_horovod.allgather(tf.convert_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of ``root_rank``."""
    return _value(_horovod.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Return this rank's share of the reduction of all ranks' values."""
    return _value(_horovod.reducescatter(tf.convert_to_tensor(value), name=name, op=op))


def _value(tensor: Any) -> Any:
    return tensor.numpy() if tf.executing_eagerly() else tensor
