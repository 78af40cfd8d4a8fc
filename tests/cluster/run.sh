#!/usr/bin/env bash
# A real SLURM of two nodes on this machine, and the scripts of examples/slurm on it. Wants root and Debian's packages, which
# it installs where they are not there. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

((EUID == 0)) || {
    echo "tests/cluster/run.sh: error: SLURM's daemons want root: run it in a container or with sudo" >&2
    exit 2
}
packages=(slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins)
if ! dpkg --status "${packages[@]}" >/dev/null 2>&1; then
    command -v apt-get >/dev/null || {
        echo "tests/cluster/run.sh: error: no apt-get here: install ${packages[*]}" >&2
        exit 2
    }
    apt-get update --quiet=2
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends "${packages[@]}" >/dev/null
fi
tools/setup.sh
export CLUSTER_TESTS=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest --override-ini="addopts=-ra --strict-markers" tests/cluster "$@"
