#!/bin/bash
# sbatch slurm_srun.sh python train.py
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
set -euo pipefail

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# srun does not take --cpus-per-task from above: without it, a rank may be left with one core.
srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" "$@"
