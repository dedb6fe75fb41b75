#!/bin/bash
# sbatch slurm_horovodrun.sh python train.py
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
set -euo pipefail

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
hosts=$(scontrol show hostnames | sed "s/$/:$SLURM_NTASKS_PER_NODE/" | paste -sd,)
horovodrun -np "$SLURM_NTASKS" -H "$hosts" --gloo "$@"
