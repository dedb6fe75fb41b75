"""What a running job needs of Horovod, whatever its framework."""
