"""Build, install and try Horovod for the torch and the TensorFlow of this environment.

This is the one recipe: ``hvd-pipe build-horovod``, ``make setup`` and the images all call it. It
needs nothing outside the standard library, so a checkout's Python can run it before anything is
installed::

    python -m hvd_pipe.build_horovod [--cuda] [--cache DIR]
"""
