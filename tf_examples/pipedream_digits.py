"""Handwritten digits with the layers divided over workers (PipeDream).

    horovodrun -np 2 python tf_examples/pipedream_digits.py
    horovodrun -np 4 python tf_examples/pipedream_digits.py --plan 2-1-1 --mode 2bw

Lines marked "hvd_pipe:" are all that hvd_pipe asks for.
"""

import argparse

import keras
import tensorflow as tf

import hvd_pipe.tensorflow as hvd
from digits_data import load
from hvd_pipe.tensorflow import pipedream  # hvd_pipe:


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="stash", help="stash (default), 2bw, flush")
    parser.add_argument("--plan", default="straight", help="straight (default), auto, 3-1, a file")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", help="directory for a checkpoint at the end")
    return parser.parse_args()


def make_model() -> keras.Model:
    layers = keras.layers
    images = layers.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(images)
    x = layers.BatchNormalization()(x)
    y = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.Add()([x, y])  # may be cut: both go on to the next stage
    x = layers.Conv2D(32, 3, activation="relu")(x)
    x = layers.Flatten()(x)
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(images, layers.Dense(10)(x))


def main() -> None:
    args = arguments()
    pipedream.init()  # hvd_pipe: finds the other ranks
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share this machine's cores
    keras.utils.set_random_seed(args.seed)
    data = load()
    train = tf.data.Dataset.from_tensor_slices((data.train_x, data.train_y))
    train = train.shuffle(len(data.train_x), seed=args.seed).batch(args.batch_size)
    test = tf.data.Dataset.from_tensor_slices((data.test_x, data.test_y)).batch(args.batch_size)

    engine = pipedream.PipeDream(  # hvd_pipe: the same on every rank
        make_model(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: keras.optimizers.SGD(args.lr, momentum=0.8),
        plan=args.plan,
        mode=args.mode,
        metric_fn=keras.metrics.sparse_categorical_accuracy,
    )
    for epoch in range(args.epochs):
        stats = engine.train_epoch(train)
        print_once(f"epoch {epoch + 1:2d}  {stats}")
    stats = engine.evaluate(test)
    print_once(f"{args.mode} on {engine.partition.config}: test accuracy {stats.metric:.2%}")
    if args.save:
        engine.save(args.save)


def print_once(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
