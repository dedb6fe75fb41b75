"""Handwritten digits with a loop of one's own: a gradient tape inside ``tf.function``.

    horovodrun -np 2 python tf_examples/custom_loop_digits.py --strategy pipe-sgd

Lines marked "hvd_pipe:" are all that hvd_pipe asks for; those marked "Horovod:" are in every
Horovod script.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf

import hvd_pipe.tensorflow as hvd  # hvd_pipe: was "import horovod.tensorflow as hvd"
from digits_data import load, share
from keras_digits import make_model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", help="merged-gradient (default) or pipe-sgd")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="images of all workers a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()  # Horovod: finds the other ranks
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share this machine's cores
    keras.utils.set_random_seed(args.seed)
    data = load()
    x, y = share(data.train_x, data.train_y, hvd.rank(), hvd.size())
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=args.seed)
    batches = batches.batch(args.batch_size // hvd.size(), drop_remainder=True)

    model = make_model()
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.8)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Horovod: all start alike.
    hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        # Horovod: averages the gradients; hvd_pipe: the strategy is the only new argument.
        tape = hvd.DistributedGradientTape(tape, strategy=args.strategy)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(args.epochs):
        losses = [float(step(images, labels)) for images, labels in batches]
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs}: loss {np.mean(losses):.4f}", flush=True)
    # hvd_pipe: under pipe-sgd, the last gradient is still on its way.
    last = hvd.drain_gradients(model.trainable_variables)
    if last is not None:
        optimizer.apply_gradients(zip(last, model.trainable_variables, strict=True))

    correct = np.argmax(model(data.test_x).numpy(), axis=1) == data.test_y
    if hvd.rank() == 0:
        print(f"{args.strategy or 'merged-gradient'}: test accuracy {correct.mean():.2%}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
