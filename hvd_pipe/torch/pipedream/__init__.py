"""PipeDream for PyTorch: split a model's layers over workers, and keep all of them busy.

from hvd_pipe.torch import pipedream

pipedream.init()
engine = pipedream.PipeDream(model, loss_fn, optimizer_fn, plan="auto", mode="stash")
for epoch in range(epochs):
    print(engine.train_epoch(loader))
print(engine.evaluate(test_loader))
"""

from typing import Any

from hvd_pipe.pipeline.runner import EpochStats
from hvd_pipe.planning.stages import Partition
from hvd_pipe.torch import horovod_api
from hvd_pipe.torch.pipedream.pipedream import PipeDream

__all__ = ["EpochStats", "Partition", "PipeDream", "init"]


def init(**options: Any) -> None:
    """Initialise Horovod with process sets that can be added later, which pipelines do.

    Args:
        options: As ``hvd.init`` takes them, but for ``process_sets``.
    """
    horovod_api.init(process_sets="dynamic", **options)
