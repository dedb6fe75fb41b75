"""Handwritten digits with ``model.fit``, distributed by one line.

    horovodrun -np 2 python tf_examples/keras_digits.py --strategy pipe-sgd

Lines marked "hvd_pipe:" are all that hvd_pipe asks for; those marked "Horovod:" are in every
Horovod script.
"""

import argparse
import zlib

import keras
import numpy as np
import tensorflow as tf

import hvd_pipe.tensorflow.keras as hvd  # hvd_pipe: was "import horovod.tensorflow.keras as hvd"
from digits_data import load, share


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", help="merged-gradient (default), pipe-sgd, cocod:period=4")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="images of all workers a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    args = arguments()
    hvd.init()  # Horovod: finds the other ranks
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share this machine's cores
    keras.utils.set_random_seed(args.seed)
    data = load()
    x, y = share(data.train_x, data.train_y, hvd.rank(), hvd.size())

    model = make_model()
    optimizer = hvd.DistributedOptimizer(  # Horovod: averages the gradients
        keras.optimizers.SGD(args.lr, momentum=0.8),
        strategy=args.strategy,  # hvd_pipe: the only new argument
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # Horovod: all start alike
        hvd.callbacks.MetricAverageCallback(),  # Horovod: one number for all ranks
    ]
    model.fit(
        x,
        y,
        batch_size=args.batch_size // hvd.size(),
        epochs=args.epochs,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 else 0,
    )

    _, accuracy = model.evaluate(data.test_x, data.test_y, verbose=0)
    weights = np.concatenate([each.numpy().ravel() for each in model.trainable_variables])
    checksums = hvd.allgather([zlib.crc32(weights.tobytes())])
    if hvd.rank() == 0:
        alike = "alike" if len(set(checksums)) == 1 else "NOT alike"
        print(f"{args.strategy or 'merged-gradient'}: test accuracy {accuracy:.2%}")
        print(f"weights on {hvd.size()} ranks: {alike} ({checksums[0]:08x})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
