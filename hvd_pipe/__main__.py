"""``python -m hvd_pipe`` is ``hvd-pipe``."""

from hvd_pipe.cli.main import main

if __name__ == "__main__":
    main(prog_name="hvd-pipe")
