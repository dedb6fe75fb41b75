#!/bin/bash
# sbatch slurm_elastic.sh python train.py
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --no-kill
#SBATCH --time=01:00:00
set -euo pipefail

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# Slurm takes a failed node out of the job's list; with --no-kill the job goes on.
discover=$(mktemp)
trap 'rm -f "$discover"' EXIT
cat >"$discover" <<END
#!/bin/sh
set -e # an answer without nodes would end the job; horovodrun asks again after an error
nodes=\$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%N)
names=\$(scontrol show hostnames "\$nodes")
echo "\$names" | sed 's/\$/:$SLURM_NTASKS_PER_NODE/'
END
chmod +x "$discover"
horovodrun -np "$SLURM_NTASKS" --min-np "$SLURM_NTASKS_PER_NODE" \
    --host-discovery-script "$discover" "$@"
