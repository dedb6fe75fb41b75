"""The ``hvd-pipe`` command; :mod:`hvd_pipe.cli.main` holds its entry."""
