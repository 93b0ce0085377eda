#!/usr/bin/env bash
# Trains on the GPUs of a SLURM job, one process a GPU. From the repository, which all nodes must see:
#   sbatch --nodes=2 launch/slurm.sh --config configs/my_run.py mesh.fsdp=16 --out /shared/runs/first
# The configuration has cpu_devices=0; the product of its mesh is the number of GPUs. `out` is a folder all nodes see.
# Once before, on a node with the GPUs' driver: bash launch/test.sh, then .venv/bin/pip install "jax[cuda12]".
# With --resume auto the same line goes on after a preemption or the end of its time: SIGTERM saves, see the page of training.
# When one process fails SLURM ends the others; its message is in slurm-<job>.out.
#SBATCH --job-name=k3jax
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8

# SLURM runs a copy of this file, so the repository is found by where sbatch was called.
source "${SLURM_SUBMIT_DIR:?submit with sbatch, from the repository}/launch/_env.sh"
exec srun --kill-on-bad-exit=1 "$venv/bin/python" -m k3jax train "$@" processes.coordinator=auto
