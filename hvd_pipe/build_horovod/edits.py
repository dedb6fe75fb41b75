"""The smallest changes to Horovod's source: for today's frameworks, and for ranks that are lost.

Horovod 0.28.1 is its newest release, and predates the C++ standard of today's torch and the header
layout of today's TensorFlow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvd_pipe.build_horovod.steps import SetupError

__all__ = ["Edit", "apply", "edits"]


@dataclass(frozen=True)
class Edit:
    """One textual change to the source: ``old`` must occur exactly once in ``path``."""

    path: str
    old: str
    new: str


# Gloo lets a rank send to all others at once, and TCP shares its link among them unfairly: over
# links of 300 Mbit/s an all-to-all of 3 MB on four ranks took 110 ms, in turn 90 ms, of which the
# bytes need 62.
ALL_TO_ALL = """
    int sendRank = (myRank + i) % worldSize;
    int recvRank = (myRank + worldSize - i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }

  for (int i = 1; i < worldSize; i++) {
    in->waitSend(opts.timeout);
    out->waitRecv(opts.timeout);
  }
"""
ALL_TO_ALL_IN_TURN = """
    int recvRank = (myRank + worldSize - i) % worldSize;
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }

  for (int i = 1; i < worldSize; i++) {
    int sendRank = (myRank + i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    in->waitSend(opts.timeout);
  }

  for (int i = 1; i < worldSize; i++) {
    out->waitRecv(opts.timeout);
  }
"""

# A rank that loses another ends its background loop, and closes its connections, by which the next
# rank notices. Horovod 0.28.1 had three faults there:
#
# 1. Finalize() of a process set, the global one included, left its connections open, as nothing
#    had set enabled_. A rank that waited for one whose loop had ended did so for all of
#    HOROVOD_GLOO_TIMEOUT_SECONDS.
# 2. Callbacks ran, and tensors were freed, under the mutexes of the queue and of the table. To
#    free a tensor takes Python's lock, which a thread that enqueues keeps while it waits for a
#    mutex. So queues are emptied before, and take nothing more until Horovod starts again.
# 3. A rank asked the others whether process sets may be removed. Where one is lost this raises an
#    exception in a thread that catches none, which ended the process.
ENABLED = "  assert(global_context.IsEnabled());\n"
ADD = "TensorTableEntry& e, Request& message) {\n  std::lock_guard<std::mutex> guard(mutex_);\n"
ADD_MULTI = """std::vector<Request>& messages) {
  std::lock_guard<std::mutex> guard(mutex_);

"""
LAST_METHOD = "  void RemoveJoinTensor();\n"
REFUSED = "  if (closed) {\n    return SHUT_DOWN_ERROR;\n  }\n"
CALLED_UNDER_THE_MUTEX = """
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);
  }
  tensor_table_.clear();
  while (!message_queue_.empty()) {
    message_queue_.pop();
  }
"""
CALLED_LATER = """
  decltype(tensor_table_) table;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    closed = true;
    table.swap(tensor_table_);
    decltype(message_queue_)().swap(message_queue_);
  }
  for (auto& e : table) {
    e.second.FinishWithCallback(status);
  }
"""
TABLE_LOCKED = """
  std::lock_guard<std::recursive_mutex> guard(mutex);
  std::vector<int32_t> ids_copy(ids_.begin(), ids_.end());
"""
QUEUES_FIRST = """
  for (auto id : Ids()) {
    Get(id).tensor_queue.FinalizeTensorQueue(status);
  }"""
OTHERS_ASKED = "    MarkProcessSetForRemoval(id);\n"
REMOVED_ALONE = """    if (failed) {
      Get(id).Finalize(status);
      DeregisterProcessSet(id);
      continue;
    }
"""
SETS_REMOVED = "  next_id_ = 1;\n"
READY_AGAIN = "  id_to_be_removed_ = NO_PENDING_REMOVAL;\n  failed = false;\n"
STARTED = "  Get(0).Initialize(global_context);\n"
TABLE_MUTEX = "  mutable std::recursive_mutex mutex;\n"
LOOP_FAILED = '<< "Horovod background loop uncaught exception: " << ex.what();\n'
SETS_FAILED = """    state.process_set_table.failed =
        state.control_operation == LibType::GLOO;
"""
QUEUE, SETS = "horovod/common/tensor_queue", "horovod/common/process_set"
WHEN_A_RANK_IS_LOST = [
    Edit("horovod/common/gloo/gloo_context.cc", ENABLED, f"{ENABLED}  enabled_ = true;\n"),
    Edit(f"{QUEUE}.h", LAST_METHOD, f"{LAST_METHOD}  bool closed = false;\n"),
    Edit(f"{QUEUE}.cc", ADD, ADD + REFUSED),
    Edit(f"{QUEUE}.cc", ADD_MULTI, ADD_MULTI + REFUSED),
    Edit(f"{QUEUE}.cc", CALLED_UNDER_THE_MUTEX, CALLED_LATER),
    Edit(f"{SETS}.cc", TABLE_LOCKED, QUEUES_FIRST + TABLE_LOCKED),
    Edit(f"{SETS}.cc", OTHERS_ASKED, REMOVED_ALONE + OTHERS_ASKED),
    Edit(f"{SETS}.cc", SETS_REMOVED, SETS_REMOVED + READY_AGAIN),
    Edit(f"{SETS}.cc", STARTED, f"  Get(0).tensor_queue.closed = false;\n{STARTED}"),
    Edit(f"{SETS}.h", TABLE_MUTEX, f"{TABLE_MUTEX}  bool failed = false;\n"),
    Edit("horovod/common/operations.cc", LOOP_FAILED, LOOP_FAILED + SETS_FAILED),
]


STREAM = """
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
"""
STREAM_FROM_ITS_HANDLE = """
#include "tensorflow/compiler/xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""


HAS_CUDA = "True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False"


def edits(
    cxx_standard: int,
    tensorflow: tuple[int, int],
    cuda: bool = False,
    hide_cuda: bool = False,
) -> list[Edit]:
    """Return the source edits that this torch and this TensorFlow need.

    Args:
        cxx_standard: With which torch compiles.
        tensorflow: Its release.
        cuda: Whether Horovod is built with CUDA.
        hide_cuda: Whether torch has CUDA, and Horovod is built without.
    """
    standard = ("set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {cxx_standard})")
    needed = [Edit("CMakeLists.txt", *standard), Edit("horovod/torch/CMakeLists.txt", *standard)]
    # Flatbuffers assigns to what it declares const, which GCC 14 refuses.
    span = "third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
    needed.append(Edit(span, "const size_type count_;", "size_type count_;"))
    if tensorflow >= (2, 16):
        # These wheels no longer ship the compiler headers that Horovod's XLA operations include.
        guard = "#if TENSORFLOW_VERSION >= 2006000000"
        needed.append(Edit("horovod/tensorflow/xla_mpi_ops.cc", guard, "#if 0"))
    if tensorflow >= (2, 16) and cuda:
        # A function that these wheels do not export: horovod.tensorflow could not be loaded.
        needed.append(Edit("horovod/tensorflow/mpi_ops.cc", STREAM, STREAM_FROM_ITS_HANDLE))
    if hide_cuda:
        # It built with a CUDA toolkit that happened to be there, or stopped at parts of one.
        needed.append(Edit("cmake/Modules/FindPytorch.cmake", HAS_CUDA, "False"))
    needed.append(Edit("third_party/gloo/gloo/alltoallv.cc", ALL_TO_ALL, ALL_TO_ALL_IN_TURN))
    return [*needed, *WHEN_A_RANK_IS_LOST]


def apply(edit: Edit, root: Path) -> None:
    """Change a file of the source below ``root``.

    Raises:
        SetupError: The text to change is not there exactly once.
    """
    path = root / edit.path
    text = path.read_text() if path.is_file() else ""
    found = text.count(edit.old)
    if found != 1:
        raise SetupError(
            f"the source edit of {edit.path} does not apply: {edit.old!r} occurs {found} times, "
            f"expected 1. Adapt edits() in hvd_pipe/build_horovod/edits.py to this Horovod."
        )
    path.write_text(text.replace(edit.old, edit.new))
