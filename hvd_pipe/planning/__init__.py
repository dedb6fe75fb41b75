"""Planning: what to send and when, as pure functions over numbers that were measured.

Nothing here imports a framework, Horovod or MPI, so all of it runs and is tested anywhere. Sizes
are in bytes and times in seconds. Import the modules by name, e.g. ``from hvd_pipe.planning
import merge``.
"""
