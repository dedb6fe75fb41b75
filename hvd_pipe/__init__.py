"""Data-parallel training that does not wait for the network.

Change ``import horovod.torch as hvd`` to ``import hvd_pipe.torch as hvd`` and keep the rest.
Importing this package imports no framework, no Horovod and no MPI.
"""

__version__ = "1.0.0"
