"""Our formulas against verl's, both ways: verl's functions beside ours, and verl's own tests with ours in their place.

verl is in an environment of its own (`tools/setup.sh --suites`), where `verl_comparison.py` and verl's tests are run.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[1] / ".venv-suites"
THEIRS = (
    "test_core_algos_on_cpu.py",
    "test_loss_aggregation_on_cpu.py",
    "test_reinforce_pp_multiturn_on_cpu.py",
    "test_rollout_corr.py",
    "test_rollout_corr_integration.py",
    "test_value_loss_normalization_on_cpu.py",
)
"""verl's test files of what has a counterpart here."""
REPLACED = {
    "agg_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_value_loss",
    "kl_penalty",
}
"""verl's functions in whose place ours are; all of them have to be asked."""


def run(*files: Path, plugins: tuple[str, ...] = ()) -> str:
    """pytest's outcome of files in that environment, where all of it has to pass."""
    python = ENVIRONMENT / "bin" / "python"
    assert python.exists(), "tools/setup.sh --suites makes the environment that this test wants"
    path = f"{HERE}{os.pathsep}{HERE.parents[1]}"
    plain = ("-s", "-c", os.devnull, "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider")
    done = subprocess.run(
        [str(python), "-m", "pytest", *plain, *plugins, *map(str, files)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(r"^=+ \d+ passed(, \d+ warnings?)? in", done.stdout, re.MULTILINE), done.stdout[-2000:]
    return done.stdout


def test_formulas_of_verl_beside_ours():
    run(HERE / "verl_comparison.py")


def test_verls_own_tests_of_ours():
    folder = ENVIRONMENT / "lib" / "python3.12" / "site-packages" / "tests" / "trainer" / "ppo"
    said = run(*(folder / file for file in THEIRS), plugins=("-p", "verl_adapters"))
    (asked,) = re.findall(r"^ours were asked of (.*)", said, re.MULTILINE)
    assert set(asked.split(", ")) == REPLACED
