"""PipeDream at run time, whatever the framework: who is who, messages, and how a schedule is run.

``plans``         from what the user asks for to stages, and a worker's part
``transport``     which rank is who, and how messages travel: ``mpi``, or ``process_sets``
``messages``      tensors as messages, and their format
``stage``         microbatches, what a stage does with each, and clipping over all stages
``build``         the steps that both frameworks take to build a worker's part
``executor``      carries a schedule's instructions out on a stage
``runner``        runs epochs, and gathers what all workers report of them
``checkpoint``    a checkpoint's files
``pipedream``     what both `PipeDream` do alike

``hvd_pipe.torch.pipedream`` and ``hvd_pipe.tensorflow.pipedream`` add stages that compute.
"""
