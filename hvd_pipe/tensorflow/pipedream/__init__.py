"""PipeDream for Keras: a model's layers on several workers, all of them kept busy.

The same script runs on every rank::

    from hvd_pipe.tensorflow import pipedream

    pipedream.init()
    engine = pipedream.PipeDream(model, loss_fn, optimizer_fn, plan="auto", mode="stash")
    for epoch in range(epochs):
        print(engine.train_epoch(dataset))
    print(engine.evaluate(test_dataset))
"""

from typing import Any

from hvd_pipe.pipeline.runner import EpochStats
from hvd_pipe.planning.stages import Partition
from hvd_pipe.tensorflow import horovod_api
from hvd_pipe.tensorflow.pipedream.pipedream import PipeDream

__all__ = ["EpochStats", "Partition", "PipeDream", "init"]


def init(**options: Any) -> None:
    """Initialise Horovod so that pipelines can add process sets later.

    Args:
        options: Arguments of ``hvd.init`` other than ``process_sets``.
    """
    horovod_api.init(process_sets="dynamic", **options)
