"""The private names of other libraries that hvd_pipe relies on; an adapter's import checks them.

A private name may go with any release, and what used it would then fail far from the cause, or
quietly do something else. So each has a row here, and `check` says at the import which are gone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

__all__ = ["KNOWN_TO_WORK", "ROWS", "PrivateName", "check", "check_keras"]

KNOWN_TO_WORK = {"horovod": "0.28.1", "keras": "3.15.1", "tensorflow": "2.21.0", "torch": "2.13.0"}
"""The version of each library with which the tests pass."""


@dataclass(frozen=True)
class PrivateName:
    """One name that is relied upon.

    Args:
        adapter: Whose import checks it: ``"torch"`` or ``"tensorflow"``.
        module: Where the name is.
        name: The name in it, with a dot the member of a class or the parameter of a function. A
            member may be an attribute that only instances have: some function of the class then
            speaks of it.
        user: Who needs it, a module of hvd_pipe without its first part.
    """

    adapter: str
    module: str
    name: str
    user: str

    @property
    def library(self) -> str:
        """The library's name, as pip knows it."""
        return self.module.partition(".")[0]

    @property
    def exists(self) -> bool:
        """Whether the installed library has the name."""
        try:
            owner: object = importlib.import_module(self.module)
        except ImportError:
            return False
        *path, last = self.name.split(".")
        for part in path:
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        if inspect.isfunction(owner):
            return last in inspect.signature(owner).parameters
        return hasattr(owner, last) or (inspect.isclass(owner) and last in _spoken_of(owner))


def _spoken_of(kind: type) -> Iterator[str]:
    """The names and words in the code of a class and its bases."""
    for base in kind.__mro__[:-1]:
        yield from getattr(base, "__annotations__", {})
        for member in vars(base).values():
            called = member.fget if isinstance(member, property) else member
            code = getattr(inspect.unwrap(called) if callable(called) else None, "__code__", None)
            if code is not None:
                yield from _words(code)


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _words(constant)


_GRAPHS = "tensorflow.python.framework"
_EAGER = "tensorflow.python.eager.polymorphic_function.polymorphic_function"
_BOTH = ("torch", "tensorflow")

ROWS = (
    *(PrivateName(a, "horovod.common.process_sets", "_setup", "runtime.consensus") for a in _BOTH),
    *(PrivateName(a, f"horovod.{a}.mpi_ops", "_basics", "runtime.consensus") for a in _BOTH),
    *(
        PrivateName(a, "horovod.common.process_sets", "_basics", "runtime.process_sets")
        for a in _BOTH
    ),
    *(
        PrivateName(
            a,
            "horovod.common.basics",
            "HorovodBasics._get_process_set_ids_and_ranks",
            "runtime.process_sets",
        )
        for a in _BOTH
    ),
    *(
        PrivateName(a, "horovod.common.basics", f"HorovodBasics.{name}", "runtime.restarts")
        for a in _BOTH
        for name in (
            "MPI_LIB_CTYPES",
            "horovod_init",
            "horovod_init_multi_comm",
            "horovod_shutdown",
        )
    ),
    PrivateName("torch", "horovod.torch.mpi_ops", "_handle_map", "torch.messages.pending"),
    *(
        PrivateName("torch", "horovod.torch.mpi_ops", f"mpi_lib.{name}", "torch.workers")
        for name in ("horovod_torch_join", "horovod_torch_reset")
    ),
    PrivateName(
        "torch",
        "horovod.torch.functions",
        "broadcast_optimizer_state.root_rank",
        "torch.horovod_api",
    ),
    PrivateName("torch", "horovod.torch.elastic.state", "TorchState._handlers", "torch.elastic"),
    PrivateName("torch", "torch", "_C._current_graph_task_id", "torch.layer_times"),
    PrivateName("torch", "torch._compile", "_disable_dynamo", "torch.layer_times"),
    PrivateName("torch", "torch", "_foreach_add_", "torch.strategies.model_average"),
    PrivateName("torch", "torch", "_foreach_copy_", "torch.strategies.model_average"),
    PrivateName("torch", "torch", "_foreach_sub_", "torch.strategies.model_average"),
    PrivateName("torch", "torch", "_foreach_mul_", "torch.parameters"),
    PrivateName("torch", "torch.utils._pytree", "tree_leaves", "torch.horovod_api"),
    PrivateName("torch", "torch.utils._pytree", "tree_map", "torch.horovod_api"),
    PrivateName("torch", "torch", "Tensor._values", "torch.parameters"),
    PrivateName("torch", "torch", "Tensor._version", "torch.messages.buckets"),
    PrivateName("torch", "torch.nn", "Module._modules", "torch.pipedream.graph"),
    PrivateName("torch", "torch.nn", "Module._forward_pre_hooks", "torch.measuring.timeline"),
    PrivateName(
        "torch", "torch.nn", "Module._non_persistent_buffers_set", "torch.pipedream.graph"
    ),
    PrivateName("torch", "torch.nn", "Module._parameters", "torch.measuring.first_uses"),
    PrivateName("torch", "torch.nn", "Module._state_dict_pre_hooks", "torch.module_hooks"),
    PrivateName("torch", "torch.nn", "Module._compiled_call_impl", "torch.measuring.first_uses"),
    *(
        PrivateName("torch", "torch.overrides", name, "torch.measuring.first_uses")
        for name in ("_get_current_function_mode_stack", "_pop_mode", "_push_mode")
    ),
    *(
        PrivateName("torch", "torch.optim", f"Optimizer.{name}", "torch.partial_updates")
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    ),
    *(
        PrivateName("torch", "torch.optim.optimizer", name, "torch.partial_updates")
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    ),
    PrivateName("torch", "torch.fx", "Graph._codegen", "torch.pipedream.graph"),
    PrivateName(
        "torch",
        "torch.autograd.grad_mode",
        "_unsafe_preserve_version_counter",
        "torch.pipedream.weights",
    ),
    PrivateName(
        "torch", "torch.optim.lr_scheduler", "LRScheduler._opt_called", "torch.distributed"
    ),
    PrivateName(
        "torch", "torch.optim.lr_scheduler", "LRScheduler._wrapped_by_lr_sched", "torch.arguments"
    ),
    PrivateName(
        "torch", "torch.optim.lr_scheduler", "LRScheduler._last_lr", "torch.pipedream.checkpoint"
    ),
    PrivateName(
        "torch", "torch.amp", "GradScaler._step_supports_amp_scaling", "torch.distributed"
    ),
    PrivateName(
        "tensorflow", "horovod.tensorflow.mpi_ops", "_allreduce", "tensorflow.messages.reduction"
    ),
    PrivateName(
        "tensorflow", "horovod.tensorflow.mpi_ops", "MPI_LIB.horovod_join", "tensorflow.workers"
    ),
    PrivateName("tensorflow", f"{_GRAPHS}.ops", "get_default_graph", "tensorflow.graphs"),
    PrivateName("tensorflow", f"{_GRAPHS}.func_graph", "FuncGraph", "tensorflow.graphs"),
    PrivateName(
        "tensorflow",
        "tensorflow.python.ops.control_flow_util",
        "GraphOrParentsInXlaContext",
        "tensorflow.graphs",
    ),
    PrivateName(
        "tensorflow",
        "tensorflow.python.ops.resource_variable_ops",
        "ResourceVariable",
        "tensorflow.graphs",
    ),
    PrivateName("tensorflow", _EAGER, "Function._function_cache", "tensorflow.graphs"),
    PrivateName(
        "tensorflow",
        "keras.src.api_export",
        "REGISTERED_OBJS_TO_NAMES",
        "tensorflow.sync_batch_norm",
    ),
    PrivateName(
        "tensorflow",
        "keras.src.saving.object_registration",
        "GLOBAL_CUSTOM_NAMES",
        "tensorflow.keras.optimizer",
    ),
    PrivateName("tensorflow", "keras.src.backend", "get_keras_mask", "tensorflow.pipedream.graph"),
    *(
        PrivateName(
            "tensorflow", "keras.src.models.functional", name, "tensorflow.measuring.layer_calls"
        )
        for name in (
            "Functional",
            "operation_fn",
            "Functional._nodes_by_depth",
            "Functional._outputs_struct",
        )
    ),
    PrivateName(
        "tensorflow", "keras", "Sequential._functional", "tensorflow.measuring.layer_calls"
    ),
    PrivateName(
        "tensorflow",
        "keras.src.models.functional",
        "Functional._inputs_struct",
        "tensorflow.pipedream.graph",
    ),
    *(
        PrivateName("tensorflow", module, name, "tensorflow.keras_patches")
        for module, name in (
            ("keras.src.trainers.trainer", "model_supports_jit"),
            ("keras.src.trainers.trainer", "Trainer"),
            ("keras.src.trainers.trainer", "Trainer.compile.jit_compile"),
            ("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer.fit.callbacks"),
            ("keras.optimizers", "LossScaleOptimizer.apply.trainable_variables"),
            ("keras.layers", "BatchNormalization._moments.mask"),
            ("keras.layers", "Layer._get_call_context"),
        )
    ),
    PrivateName(
        "tensorflow",
        "keras.layers",
        "BatchNormalization._reduction_axes",
        "tensorflow.sync_batch_norm",
    ),
    *(
        PrivateName("tensorflow", "keras.layers", f"Layer.{name}", "tensorflow.keras.variables")
        for name in ("_flatten_layers", "_non_trainable_variables")
    ),
    *(
        PrivateName(
            "tensorflow", "keras.optimizers", f"Optimizer.{name}", "tensorflow.keras.accumulation"
        )
        for name in ("_accumulated_gradients", "_get_variable_index")
    ),
    *(
        PrivateName(
            "tensorflow", "keras.optimizers", f"Optimizer.{name}", "tensorflow.keras.late_updates"
        )
        for name in (
            "_apply_weight_decay",
            "_backend_apply_gradients",
            "_backend_update_step",
            "_clip_gradients",
            "_iterations",
            "_learning_rate",
            "_trainable_variables",
        )
    ),
    *(
        PrivateName(
            "tensorflow", "keras.optimizers", f"Optimizer.{name}", "tensorflow.keras.optimizer"
        )
        for name in (
            "_check_variables_are_known",
            "_iterations",
            "_model_variables_moving_average",
            "_trainable_variables",
            "_var_key",
        )
    ),
    PrivateName(
        "tensorflow",
        "keras.optimizers",
        "Optimizer._learning_rate",
        "tensorflow.pipedream.weights",
    ),
)


def check(adapter: str) -> None:
    """Raise unless every private name that an adapter relies on is there.

    Args:
        adapter: ``"torch"`` or ``"tensorflow"``.

    Raises:
        ImportError: With the names that are gone, and the versions that are known to work; or
            as `check_keras`.
    """
    if adapter == "tensorflow":
        check_keras()
    gone = [row for row in ROWS if row.adapter == adapter and not row.exists]
    if not gone:
        return
    names = "; ".join(f"{row.module}.{row.name} (for hvd_pipe.{row.user})" for row in gone)
    libraries = sorted({row.library for row in gone})
    have = ", ".join(f"{each} {_version(each)}" for each in libraries)
    works = " ".join(f"{each}=={KNOWN_TO_WORK[each]}" for each in libraries)
    raise ImportError(
        f"hvd_pipe.{adapter} relies on private names that {have} does not have: {names}. "
        f"Known to work: {works}. Install that, and build Horovod for it with `hvd-pipe "
        "build-horovod`."
    )


def check_keras() -> None:
    """Raise unless this is Keras 3 on TensorFlow.

    Raises:
        ImportError: With what to install or set.
    """
    keras, tf = (importlib.import_module(name) for name in ("keras", "tensorflow"))
    if int(keras.__version__.partition(".")[0]) < 3:
        raise ImportError(
            f"hvd_pipe.tensorflow needs Keras 3, as in TensorFlow 2.16 and newer (tested: 2.21); "
            f"this is Keras {keras.__version__} with TensorFlow {tf.__version__}. Upgrade with "
            "`pip install 'tensorflow>=2.16'` and build Horovod for it with `hvd-pipe "
            "build-horovod`. Or stay, and import horovod.tensorflow: under Keras 2, stock Horovod "
            "works."
        )
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            f"hvd_pipe.tensorflow needs Keras on TensorFlow, and KERAS_BACKEND is "
            f"{keras.backend.backend()!r}: set KERAS_BACKEND=tensorflow."
        )


def _version(library: str) -> str:
    for name in (library, f"{library}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(version not known)"
