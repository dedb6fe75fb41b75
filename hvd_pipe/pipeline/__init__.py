"""PipeDream at run time, whatever the framework: who is who, messages, and how a schedule is run.

``plans``      what the user asks for, as stages of :mod:`hvd_pipe.planning.partition`
``layout``     which rank is which replica of which stage
``wire``       how tensors become messages
``transport``  how messages travel: MPI, or Horovod's process sets
``stage``      what a framework's stage does
``feed``       a loader's minibatches
``files``      a checkpoint's files
``executor``   carries a schedule's instructions out on a stage
``session``    epochs, and what all workers report of them

``hvd_pipe.torch.pipedream`` and ``hvd_pipe.tensorflow.pipedream`` add stages that compute.
"""
