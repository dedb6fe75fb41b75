"""Training speed on random images: how long a step takes, and nothing else.

    horovodrun -np 4 python tf_examples/synthetic_benchmark.py --model ResNet50
    horovodrun -np 4 python tf_examples/synthetic_benchmark.py --model ResNet50 --strategy pipe-sgd
    horovodrun -np 4 python tf_examples/synthetic_benchmark.py --model ResNet50 --strategy horovod

A run that a laptop's CPU finishes in seconds:

    horovodrun -np 2 python tf_examples/synthetic_benchmark.py

Lines marked "hvd_pipe:" are all that hvd_pipe asks for.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as stock  # only for --strategy horovod
import keras
import numpy as np
import tensorflow as tf

import hvd_pipe.tensorflow.keras as hvd  # hvd_pipe: was "import horovod.tensorflow.keras as hvd"

COMPRESSION = ("none", "fp16", "bf16", "int8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Images per second of a training step on random data.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model",
        default="tiny",
        help="tiny, or one of keras.applications, such as ResNet50 or MobileNetV2",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker and step")
    parser.add_argument("--image-size", type=int, help="224, and 32 for tiny, by default")
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument(
        "--num-warmup-batches",
        type=int,
        default=20,
        help="not measured; merged-gradient makes its plan in the first 15",
    )
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument(
        "--compression", choices=COMPRESSION, default="none", help="how gradients travel"
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="--compression fp16")
    parser.add_argument(
        "--strategy",
        help="merged-gradient, pipe-sgd, cocod:period=4, ... or horovod for stock Horovod's tape; "
        "without it HVD_PIPE_STRATEGY decides, else merged-gradient",
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    args = parser.parse_args()
    if min(args.num_iters, args.num_batches_per_iter, args.batch_size) < 1:
        parser.error("--num-iters, --num-batches-per-iter and --batch-size: 1 or more")
    if args.fp16_allreduce:
        args.compression = "fp16"
    if args.strategy == "horovod" and args.compression not in ("none", "fp16"):
        parser.error(f"--strategy horovod: stock Horovod has no {args.compression}, but fp16")
    if args.model != "tiny" and not callable(getattr(keras.applications, args.model, None)):
        names = sorted(n for n in dir(keras.applications) if n[0].isupper())
        parser.error(f"--model {args.model}: there is tiny, {', '.join(names)}")
    args.image_size = args.image_size or (32 if args.model == "tiny" else 224)
    return args


def build_model(name: str, size: int, classes: int) -> keras.Model:
    if name != "tiny":
        made: Callable[..., keras.Model] = getattr(keras.applications, name)
        return made(
            weights=None,  # nothing is downloaded
            input_shape=(size, size, 3),
            classes=classes,
            classifier_activation=None,
        )
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((size, size, 3)),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(classes),
        ]
    )


class StockModel(keras.Model):
    """Stock Horovod: its optimizer averages nothing in Keras 3's ``fit``, but its tape does."""

    compression = stock.Compression.none

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        tape = stock.DistributedGradientTape(tape, compression=self.compression)
        gradients = tape.gradient(loss, [each.value for each in self.trainable_variables])
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Clock(keras.callbacks.Callback):
    """Images per second of this worker, in each of ``fit``'s epochs but the first ones."""

    def __init__(self, images: int, warmup_epochs: int, log: Callable[[str], None]) -> None:
        super().__init__()
        self.images, self.warmup_epochs, self.log = images, warmup_epochs, log
        self.rates: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # ``logs`` holds the last step's loss as a number, so a GPU does not lag behind.
        if epoch >= self.warmup_epochs:
            self.rates.append(self.images / (time.perf_counter() - self.start))
            self.log(f"Iter #{len(self.rates) - 1}: {self.rates[-1]:.1f} img/sec per worker")


def main() -> None:
    args = arguments()
    is_stock = args.strategy == "horovod"
    # hvd_pipe.tensorflow.init() switches Horovod's own fusion of messages off, as our buckets are
    # merged already; stock Horovod has to be measured with it.
    (stock if is_stock else hvd).init()
    gpus = [] if args.no_cuda else tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices(gpus[hvd.local_rank() :][:1], "GPU")  # Horovod: one a process
    if not gpus:  # ranks on one machine share its cores
        cores = max(1, (os.cpu_count() or 1) // hvd.local_size())
        tf.config.threading.set_intra_op_parallelism_threads(cores)

    def log(message: str) -> None:
        if hvd.rank() == 0:
            # In one write, which horovodrun's prefixes leave in one piece.
            sys.stdout.write(f"{message}\n")
            sys.stdout.flush()

    keras.utils.set_random_seed(1)
    model = build_model(args.model, args.image_size, args.num_classes)
    optimizer = keras.optimizers.SGD(0.01)
    if is_stock:
        model = StockModel(inputs=model.inputs, outputs=model.outputs)
        model.compression = getattr(stock.Compression, args.compression)
    else:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            compression=getattr(hvd.Compression, args.compression),
            strategy=args.strategy,  # hvd_pipe: the only new argument
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    x = tf.random.normal((args.batch_size, args.image_size, args.image_size, 3))
    y = tf.random.uniform((args.batch_size,), maxval=args.num_classes, dtype=tf.int32)

    sizes = [each.value.shape.num_elements() for each in model.trainable_variables]
    strategy = args.strategy or os.environ.get("HVD_PIPE_STRATEGY") or "merged-gradient"
    log(f"Model: {args.model}, {sum(sizes) / 1e6:.1f} M parameters in {len(sizes)} tensors")
    log(f"Strategy: {strategy}, batch size {args.batch_size}, compression {args.compression}")
    log(f"Workers: {hvd.size()}, each on {'a GPU' if gpus else 'the CPU'}")

    steps = args.num_batches_per_iter
    warmup_epochs = -(-args.num_warmup_batches // steps)
    clock = Clock(steps * args.batch_size, warmup_epochs, log)
    model.fit(
        tf.data.Dataset.from_tensors((x, y)).repeat(),
        steps_per_epoch=steps,
        epochs=warmup_epochs + args.num_iters,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # Horovod: start from equal weights
            clock,
        ],
        shuffle=False,
        verbose=0,
    )

    # Every worker's own measurements, not the first one's times the number of workers.
    total = hvd.allreduce(np.array(clock.rates), op=hvd.Sum, name="rates")
    mean, spread, n = np.mean(total), 1.96 * np.std(total), hvd.size()
    log(f"Img/sec per worker: {mean / n:.1f} +-{spread / n:.1f}")
    log(f"Total img/sec on {n} worker(s): {mean:.1f} +-{spread:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
